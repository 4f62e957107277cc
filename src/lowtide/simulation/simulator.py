"""The simulator: one training step replayed under a plan, as bytes and milliseconds. It evaluates every plan.

``simulated_step.py`` counts the bytes, ``transfers.py`` the time spent waiting for links. Solvers call
``simulate_actions`` and ``contents_at_peak``; of the rules inside they share only the transfer queue.

Known weakness: an op's temporaries count only as far as ``Op.workspace_bytes`` was measured, and two storages that
share one allocator block count as two.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

from lowtide.errors import PlanMismatchError
from lowtide.graph.costs import Costs
from lowtide.graph.memo import once_per_graph
from lowtide.graph.step_graph import StepGraph
from lowtide.graph.writes import ops_written_under
from lowtide.plan import ACTIONS, RECOMPUTE, SAVE, TIER_OF, Moves, Plan
from lowtide.simulation.allocator_peaks import AllocatorPeaks, allocator_peaks
from lowtide.simulation.replay_bursts import Replay
from lowtide.simulation.simulated_step import SimulatedStep
from lowtide.simulation.transfers import STARTED, Transfer, time_transfers


@dataclass(frozen=True)
class Timeline:
    """What the step does with memory, by simulation. All bytes are absolute, and allocated where no other word is said.

    Attributes:
        peak_bytes: Most live bytes at any moment, transients included.
        step_ms: Forward and backward, replays, stalls and the tape's own work included.
        recompute_ms: The part of ``step_ms`` that the plain step does not have.
        live_bytes: Live bytes after each event of the graph.
        event_peak_bytes: Most live bytes during each event.
        replays: Ops in the order in which they run again.
        transfers: Transfers of offloaded storages, in the order of the requests.
    """

    peak_bytes: int
    step_ms: float
    recompute_ms: float
    live_bytes: tuple[int, ...]
    event_peak_bytes: tuple[int, ...]
    replays: tuple[Replay, ...]
    transfers: tuple[Transfer, ...] = ()
    _ask_allocator: Callable[[], AllocatorPeaks | None] = field(default=lambda: None, repr=False, compare=False)

    @property
    def counted_peak_bytes(self) -> int | None:
        """``peak_bytes`` as the device's allocator counts it, with what is not split off a block; None as below."""
        return None if self._allocator_peaks is None else self._allocator_peaks.counted_bytes

    @property
    def reserved_peak_bytes(self) -> int | None:
        """Most bytes that the device's allocator reserves for such steps.

        None on a CPU, which has no caching allocator, and where the allocator's settings are not modelled
        (``allocator_peaks.py``).
        """
        return None if self._allocator_peaks is None else self._allocator_peaks.reserved_bytes

    @cached_property
    def _allocator_peaks(self) -> AllocatorPeaks | None:
        """Simulated when first asked for."""
        return self._ask_allocator()

    @property
    def stall_ms(self) -> float:
        """How long the step waits for transfers."""
        return sum(t.waited_ms for t in self.transfers)

    @property
    def peak_event(self) -> int:
        """Index of the first event at which the peak is reached."""
        return self.event_peak_bytes.index(self.peak_bytes) if self.peak_bytes in self.event_peak_bytes else 0


def simulate(graph: StepGraph, costs: Costs, plan: Plan | Mapping[int, str]) -> Timeline:
    """Run one training step under ``plan`` and return memory over time.

    Args:
        graph: Forward and backward ops in execution order.
        costs: Milliseconds per op, and the links to tiers that the plan uses.
        plan: A plan made for ``graph``, or actions by storage id; a storage without one is saved. Actions alone replay
            each op once at most, offload one storage at a time, and fetch it when it is needed.

    Raises:
        PlanMismatchError: ``plan`` was made for another graph, or asks for what ``graph`` does not allow.
    """
    if isinstance(plan, Plan):
        if plan.graph_fingerprint != graph.fingerprint:
            raise PlanMismatchError(
                f"the plan was made for graph {plan.graph_fingerprint}, this graph is {graph.fingerprint}. "
                "Solve again for this graph, or load the graph that the plan was made for."
            )
        replays, moves = plan.replays_of(), plan.moves
        plan = plan.action_of()
    else:
        replays, moves = {}, Moves()
    _check(graph, costs, plan)
    return simulate_actions(graph, costs, plan, replays, moves)


def simulate_actions(
    graph: StepGraph,
    costs: Costs,
    actions: Mapping[int, str],
    replays: Mapping[int, int] | None = None,
    moves: Moves | None = None,
    limit_bytes: float = math.inf,
) -> Timeline:
    """``simulate`` for actions that are known to suit ``graph``: the inner loop of a search.

    Args:
        limit_bytes: The timeline ends with the first event that needs more: whoever asks has no use for the rest.
        replays: How often a recomputed storage may be replayed, by storage id; 1 where absent.
        moves: When offloaded storages travel; None: one at a time, and fetched when needed.

    Raises:
        PlanMismatchError: a value is unpacked whose recipe is gone, or a count in ``replays`` is below 1.
    """
    if all(action == SAVE for action in actions.values()):
        step = _plain_step(graph)
    else:
        step = SimulatedStep(graph, actions, replays or {}, moves or Moves())
        step.play(graph.events, limit_bytes)
    references = step.references
    replay_ms = sum(costs.op_ms[r.op] + costs.replay_us / 1e3 for r in step.bursts.replays)
    record_ms = costs.record_us / 1e3 * sum(references.records.values())
    # Without a recomputed or offloaded storage the tape does not run.
    dispatch_ms = costs.dispatch_us / 1e3 * len(graph.forward_ops) if references.with_value else 0.0
    extra_ms = replay_ms + record_ms + dispatch_ms
    transfers = time_transfers(step.offload.log, graph.ops, costs, references)
    if transfers:
        num_fetched = sum(what == STARTED for what, _, _ in step.offload.log)
        extra_ms += sum(t.waited_ms for t in transfers) + (costs.replay_us + costs.move_us) / 1e3 * num_fetched
    return Timeline(
        peak_bytes=max(step.event_peak_bytes, default=graph.start_bytes),
        step_ms=costs.plain_step_ms + extra_ms,
        recompute_ms=extra_ms,
        live_bytes=tuple(step.live_bytes),
        event_peak_bytes=tuple(step.event_peak_bytes),
        replays=tuple(step.bursts.replays),
        transfers=transfers,
        _ask_allocator=partial(allocator_peaks, graph, dict(actions), dict(replays or {}), moves or Moves()),
    )


@once_per_graph
def _plain_step(graph: StepGraph) -> SimulatedStep:
    step = SimulatedStep(graph, {}, {}, Moves())
    step.play(graph.events)
    return step


def _check(graph: StepGraph, costs: Costs, actions: Mapping[int, str]) -> None:
    for storage_id, action in actions.items():
        if not 0 <= storage_id < len(graph.storages):
            raise PlanMismatchError(
                f"the plan decides on storage {storage_id}, the graph has {len(graph.storages)}. Solve again for it."
            )
        storage = graph.storages[storage_id]
        if action == SAVE:
            continue
        why = storage.fixed if storage.op is not None else "it was there before the step"
        if storage.kind != "activation" and not why:
            why = "it is made in backward"
        if action in TIER_OF:
            if why:
                raise PlanMismatchError(f"storage {storage_id} cannot be moved: {why}. Save it.")
            if TIER_OF[action] not in costs.links:
                raise PlanMismatchError(
                    f"storage {storage_id}: action {action!r} needs the link to the {TIER_OF[action]} tier, and costs "
                    f"knows none.\nMeasure it: lowtide.measure(graph, tiers=({TIER_OF[action]!r},))."
                )
            continue
        if action != RECOMPUTE:
            raise PlanMismatchError(f"storage {storage_id}: action {action!r} is not known. Use {', '.join(ACTIONS)}.")
        for read in () if why or storage.op is None else graph.ops[storage.op].reads:
            source = graph.storages[read]
            if source.kind != "activation" and (source.op is not None or source.fixed):
                why = f"its op reads storage {read}, which {source.fixed or 'is made in backward'}"
        if storage.op in ops_written_under(graph):
            why = why or "what its op reads is written before backward has asked for it"
        if why:
            raise PlanMismatchError(f"storage {storage_id} cannot be recomputed: {why}. Save it.")
