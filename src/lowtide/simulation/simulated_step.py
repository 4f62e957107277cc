"""A step under a plan, played event by event: the one place where events change reference counts."""

import math
from collections.abc import Mapping

from lowtide.graph.step_graph import DROP, FREE, PACK, RUN, UNPACK, StepGraph
from lowtide.plan import Moves
from lowtide.simulation.references import Probe, References, graph_index
from lowtide.simulation.replay_bursts import ReplayBursts
from lowtide.simulation.transfers import OffloadedStorages


class SimulatedStep:
    """A step of which some events have been played: live bytes over time.

    Args:
        replays_of: By recomputed storage: how often it may be replayed; 1 where absent.
        probe: See ``References``.
        counted_by: ``References``, or a subclass that sees its calls.

    Attributes:
        live_bytes: After each event. ``event_peak_bytes``: the most during each event.
    """

    def __init__(
        self,
        graph: StepGraph,
        actions: Mapping[int, str],
        replays_of: Mapping[int, int],
        moves: Moves,
        probe: Probe | None = None,
        counted_by: type[References] = References,
    ) -> None:
        self.references = counted_by(graph_index(graph), actions, probe)
        self.offload = OffloadedStorages(self.references, moves)
        self.bursts = ReplayBursts(self.references, self.offload, replays_of)
        self.live_bytes: list[int] = []
        self.event_peak_bytes: list[int] = []

    def play(self, events: tuple[tuple[int, int], ...], limit_bytes: float = math.inf) -> None:
        """Play ``events``, from the start of the step, up to the first that needs more than ``limit_bytes``.

        Raises:
            PlanMismatchError: a value is unpacked whose recipe is gone.
        """
        references, offload, bursts = self.references, self.offload, self.bursts
        index, with_value, originals = references.index, references.with_value, references.originals
        materialised, value_counts = references.materialised, references.value_counts
        retain, release, release_value = references.retain, references.release, references.release_value
        run_op, transient_results, offloads = references.run_op, bursts.transient_results, bool(references.offloaded)
        live_bytes, event_peak_bytes = self.live_bytes, self.event_peak_bytes
        passes = bursts.passes
        maker, saved, backward_start = index.maker, index.saved, index.backward_start
        for at, (kind, number) in enumerate(events):
            if at == backward_start:
                references.release_originals()
            if passes is not None:
                passes.begin_event(kind, number)
            if kind == RUN:
                run_op(number)
                if offloads:
                    offload.after_op(number, at)
                event_peak_bytes.append(references.high_bytes)
                live_bytes.append(references.live_bytes)
                if references.high_bytes > limit_bytes:
                    return
                continue
            references.high_bytes = 0
            if kind == UNPACK and offloads:
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
                        if passes is not None:
                            passes.hand_out(storage)
                    elif kind == DROP:
                        if passes is not None:
                            passes.drop(storage)
                        if storage in transient_results:
                            bursts.drop_result(storage)
                    if kind in (PACK, UNPACK):
                        value_counts[storage] += 1
                    else:
                        release_value(storage)
                elif kind in (PACK, UNPACK):
                    retain(storage)
                else:
                    release(storage)
            live, high = references.live_bytes, references.high_bytes
            live_bytes.append(live)
            event_peak_bytes.append(high if high > live else live)
            if high > limit_bytes:
                return
