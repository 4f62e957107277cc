"""The judge: one training step replayed under a plan, as bytes and milliseconds. Shares no code with a solver.

``references.py`` has the bytes, ``transfers.py`` what waiting for links costs; here are the checks before and the sums
after.

Known weakness: an op's own temporaries count only as far as ``Op.workspace_bytes`` was measured, and two storages
that share one allocator block count as two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.errors import PlanMismatchError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import RUN, StepGraph
from lowtide.plan import ACTIONS, RECOMPUTE, SAVE, TIER_OF, Moves, Plan
from lowtide.simulation.references import Replay, Run, begin, run_step
from lowtide.simulation.transfers import Transfer, price


@dataclass(frozen=True)
class Timeline:
    """What the step does with memory, by simulation. All bytes are absolute and allocated.

    Attributes:
        peak_bytes: Most live bytes at any moment, transients included.
        step_ms: Forward and backward, replays, stalls and the tape's own work included.
        recompute_ms: The part of ``step_ms`` that the plain step does not have.
        live_bytes: Live bytes after each event of the graph.
        event_peak_bytes: Most live bytes during each event.
        replays: Ops in the order in which they run again.
        transfers: Of moved storages, in the order in which they were asked for.
    """

    peak_bytes: int
    step_ms: float
    recompute_ms: float
    live_bytes: tuple[int, ...]
    event_peak_bytes: tuple[int, ...]
    replays: tuple[Replay, ...]
    transfers: tuple[Transfer, ...] = ()

    @property
    def stall_ms(self) -> float:
        """How long the step stands still for transfers."""
        return sum(t.waited_ms for t in self.transfers)

    @property
    def peak_event(self) -> int:
        """Index of the first event at which the peak is reached."""
        return self.event_peak_bytes.index(self.peak_bytes) if self.peak_bytes in self.event_peak_bytes else 0


@dataclass(frozen=True)
class Contents:
    """What memory holds when the peak is first reached.

    Attributes:
        event: Index into ``StepGraph.events``.
        op: What runs then (or ran last); None at the start of the step. ``replay``: it runs again, in backward.
        originals: Bytes by storage, of what first runs made. ``replayed``: of what replays made.
        peak_bytes: These, what lived before the step, workspace and generator state.
    """

    event: int
    op: int | None
    replay: bool
    originals: dict[int, int]
    replayed: dict[int, int]
    peak_bytes: int


def simulate(graph: StepGraph, costs: Costs, plan: Plan | Mapping[int, str]) -> Timeline:
    """Run one training step under ``plan`` and return memory over time.

    Args:
        graph: Forward and backward ops in execution order.
        costs: Milliseconds per op, and the links to tiers that the plan uses.
        plan: A plan made for ``graph``, or actions by storage id; a storage without one is saved. Actions alone replay
            each op once at most, move one storage at a time, and fetch it when it is needed.

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
) -> Timeline:
    """``simulate`` for actions that are known to suit ``graph``: the inner loop of a search.

    Args:
        replays: How often a recomputed storage may be made again, by storage id; 1 where absent.
        moves: When moved storages travel; None: one at a time, and back when needed.

    Raises:
        PlanMismatchError: a value is unpacked whose recipe is gone, or a count in ``replays`` is below 1.
    """
    run = run_step(graph, actions, replays or {}, moves or Moves())
    replay_ms = sum(costs.op_ms[r.op] + costs.replay_us / 1e3 for r in run.replays)
    record_ms = costs.record_us / 1e3 * run.recorded
    # The tape steps aside altogether when nothing is recomputed or moved.
    mode_ms = costs.dispatch_us / 1e3 * len(graph.forward_ops) if run.valued else 0.0
    extra_ms = replay_ms + record_ms + mode_ms
    transfers = _transfers(graph, costs, run) if run.moved else ()
    if transfers:
        extra_ms += sum(t.waited_ms for t in transfers) + costs.replay_us / 1e3 * run.fetched
    return Timeline(
        peak_bytes=max(run.peaks, default=graph.resident_bytes),
        step_ms=costs.plain_step_ms + extra_ms,
        recompute_ms=extra_ms,
        live_bytes=tuple(run.lives),
        event_peak_bytes=tuple(run.peaks),
        replays=tuple(run.replays),
        transfers=transfers,
    )


def _transfers(graph: StepGraph, costs: Costs, run: Run) -> tuple[Transfer, ...]:
    added = {op.id: costs.dispatch_us + costs.record_us * run.records.get(op.id, 0) for op in graph.forward_ops}
    sizes = {s: graph.storages[s].bytes for s in run.moved}
    return price(run.log, costs, sizes, run.moved, added)


def contents_at_peak(
    graph: StepGraph,
    actions: Mapping[int, str],
    replays: Mapping[int, int] | None,
    timeline: Timeline,
    moves: Moves | None = None,
) -> Contents:
    """What fills memory at the first moment of the peak.

    Args:
        timeline: What ``simulate_actions`` gives for the other arguments.
    """
    peak_bytes, event = timeline.peak_bytes, timeline.peak_event
    again = begin(graph, actions, replays or {}, moves or Moves())
    again.watched = peak_bytes
    again.play(graph.events[: event + 1])
    if again.seen is None:  # nothing runs at that moment
        again.look(None)
    assert again.seen is not None
    originals, replayed = again.seen
    here = [r.op for r in timeline.replays if r.event == event and r.peak_bytes == peak_bytes]
    runs = [number for kind, number in graph.events[: event + 1] if kind == RUN]
    op = here[0] if here else runs[-1] if runs else None
    return Contents(event, op, bool(here), originals, replayed, peak_bytes)


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
        if why:
            raise PlanMismatchError(f"storage {storage_id} cannot be recomputed: {why}. Save it.")
