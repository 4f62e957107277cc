"""One simulated step: the events of a graph played under actions, as live bytes over time."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.graph.memo import once_per_graph
from lowtide.graph.step_graph import DROP, FREE, PACK, RUN, UNPACK, StepGraph
from lowtide.plan import SAVE, Moves
from lowtide.simulation.references import References, graph_index
from lowtide.simulation.replay_bursts import ReplayBursts
from lowtide.simulation.transfers import OffloadedStorages, Probe


def run_step(
    graph: StepGraph, actions: Mapping[int, str], replays_of: Mapping[int, int], moves: Moves
) -> SimulatedStep:
    """The whole step under ``actions``.

    Raises:
        PlanMismatchError: a value is unpacked whose recipe is gone, or a count in ``replays_of`` is below 1.
    """
    if all(action == SAVE for action in actions.values()):
        return _plain_step(graph)
    step = SimulatedStep(graph, actions, replays_of, moves)
    step.play(graph.events)
    return step


@once_per_graph
def _plain_step(graph: StepGraph) -> SimulatedStep:
    step = SimulatedStep(graph, {}, {}, Moves())
    step.play(graph.events)
    return step


class SimulatedStep:
    """A step of which some events have been played.

    Args:
        replays_of: By recomputed storage: how often it may be replayed; 1 where absent.
        probe: Called at every moment that may be a peak.

    Attributes:
        live_bytes: After each event. ``event_peak_bytes``: the most during each event.
        recipes: Ops that have left a recipe.
    """

    def __init__(
        self,
        graph: StepGraph,
        actions: Mapping[int, str],
        replays_of: Mapping[int, int],
        moves: Moves,
        probe: Probe | None = None,
    ) -> None:
        self.references = References(graph_index(graph), actions)
        self.offload = OffloadedStorages(self.references, moves, probe)
        self.bursts = ReplayBursts(self.references, self.offload, replays_of, probe)
        self.probe = probe
        self.live_bytes: list[int] = []
        self.event_peak_bytes: list[int] = []
        self.recipes: list[int] = []

    def play(self, events: tuple[tuple[int, int], ...]) -> None:
        """Play ``events``, from the start of the step."""
        references, offload, bursts = self.references, self.offload, self.bursts
        index, with_value, originals = references.index, references.with_value, references.originals
        materialised, value_counts = references.materialised, references.value_counts
        retain, release, release_value = references.retain, references.release, references.release_value
        replays, transient_results = bursts.replays, bursts.transient_results
        live_bytes, event_peak_bytes = self.live_bytes, self.event_peak_bytes
        maker, saved = index.maker, index.saved
        for at, (kind, number) in enumerate(events):
            if at == index.backward_start:
                references.release_originals()
            if kind == RUN:
                event_peak_bytes.append(self._run_op(number, at))
                live_bytes.append(references.live_bytes)
                continue
            replays_before = len(replays)
            if kind == UNPACK and references.offloaded:
                offload.on_unpack(at)
            storage = number if kind == FREE else saved[number]
            if maker[storage] >= 0:
                if kind == FREE:
                    release(storage)
                    if storage in originals:
                        originals.remove(storage)
                        release_value(storage)
                elif storage in with_value:
                    if kind == UNPACK:
                        if storage not in materialised:
                            bursts.run(storage, at)
                        elif storage in offload.fetching:
                            offload.wait_for(storage, at)
                        if storage in transient_results:
                            transient_results[storage] += 1
                    elif kind == DROP and storage in transient_results:
                        bursts.drop_result(storage)
                    if kind in (PACK, UNPACK):
                        value_counts[storage] += 1
                    else:
                        release_value(storage)
                elif kind in (PACK, UNPACK):
                    retain(storage)
                else:
                    release(storage)
            peak = live = references.live_bytes
            if len(replays) > replays_before:
                peak = max(live, *(r.peak_bytes for r in replays[replays_before:]))
            if offload.high_bytes > peak:
                peak = offload.high_bytes
            offload.high_bytes = 0
            live_bytes.append(live)
            event_peak_bytes.append(peak)

    def _run_op(self, op: int, event: int) -> int:
        """Run ``op`` for the first time. Returns the most bytes live meanwhile."""
        references = self.references
        has_recipe = op in references.recipe_ops
        if has_recipe:
            references.live_bytes += references.index.rng_bytes[op]  # recorded before the op draws
        references.run_op(op)
        peak_bytes = references.live_bytes + references.index.workspace_bytes[op]
        if has_recipe:
            self.recipes.append(op)
            references.add_recipe(op)
        if self.probe is not None:
            self.probe(references, peak_bytes, None)
        if references.offloaded:
            self.offload.after_op(op, event)
        return peak_bytes
