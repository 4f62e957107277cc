"""The one place where a candidate becomes a ``Plan``: simulated, bounded, written down with its evidence."""

import time
from dataclasses import replace

from lowtide.errors import LowtideError
from lowtide.graph.costs import Costs
from lowtide.graph.facts import passes
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import ALLOCATED, RECOMPUTE, SAVE, TIER_OF, Decision, Plan, PlannedOp
from lowtide.solvers.arguments import activation_bytes
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.graph_queries import taped_ops
from lowtide.solvers.lower_bound.bound import HOLDS_FOR, MOVES_HOLD_FOR, bound_time
from lowtide.solvers.lower_bound.tighten_bound import tighten_bound
from lowtide.solvers.peak_report import evidence
from lowtide.solvers.search_context import SearchContext


def build_plan(
    context: SearchContext,
    candidate: Candidate,
    *,
    method: str,
    budget_bytes: int | None = None,
    budget_kind: str = ALLOCATED,
    start_s: float | None = None,
    tighten: bool = False,
    bounded: bool = True,
) -> Plan:
    """The plan that carries out ``candidate``, with its prediction, its bound and its evidence.

    Args:
        budget_kind: What the budget is stated in. Reserved bytes are never fewer than allocated ones, so the bound for
            the same number of allocated bytes holds.
        start_s: ``time.perf_counter()`` when solving began; None where nothing was solved.
        tighten: Whether to spend time on a tighter bound where the gap is large.
        bounded: Whether to spend time on a bound at all.

    Raises:
        LowtideError: the candidate's simulated peak is above the budget.
    """
    graph, costs, timeline = context.graph, context.costs, context.simulated(candidate).timeline
    if budget_bytes is not None and timeline.peak_bytes > budget_bytes:
        raise LowtideError(
            f"method={method!r} came with a plan of {timeline.peak_bytes} bytes for a budget of {budget_bytes} bytes.\n"
            "This is a bug in lowtide. Another budget may do."
        )
    taped = taped_ops(graph)
    forward = {op.id: place for place, op in enumerate(taped)}
    finished = {op.completes_inplace for op in taped}
    decisions = []
    for storage_id, action in sorted(candidate.actions.items()):
        storage = graph.storages[storage_id]
        assert storage.op is not None
        replay_ms = costs.op_ms[storage.op] + costs.replay_us / 1e3 if action == RECOMPUTE else 0.0
        replays = candidate.replays.get(storage_id, 1) if action == RECOMPUTE else 1
        fetch_at = candidate.moves.fetch_at.get(storage_id) if action in TIER_OF else None
        decisions.append(Decision(
            storage_id, action, storage.bytes, forward[storage.op], storage.output, storage_id in graph.stored,
            replay_ms, replays, fetch_at,
        ))  # fmt: skip
    ops = []
    for op in taped:
        completes = None if op.completes_inplace is None else forward[op.completes_inplace]
        # An op that others finish counts their reads as its own, and does not get them itself.
        reads = 0 if op.id in finished else sum(candidate.actions.get(s, SAVE) != SAVE for s in op.reads)
        ops.append(PlannedOp(op.name, op.frame, op.dynamic, completes, reads))
    bound = None
    if budget_bytes is not None and bounded:
        bound = bound_time(context, budget_bytes, candidate.capacities)
        if tighten and not candidate.capacities:
            bound = tighten_bound(context, budget_bytes, timeline.step_ms, bound)
    searched = {}
    if candidate.bound_ms is not None:
        searched["search_bound"] = f"{candidate.bound_ms:.3f} ms for the plans that method {method} looks at"
    return Plan(
        budget_kind=budget_kind,
        predicted_reserved_peak_bytes=timeline.reserved_peak_bytes,
        predicted_counted_peak_bytes=timeline.counted_peak_bytes,
        method=method,
        decisions=tuple(decisions),
        frames=graph.frames,
        ops=tuple(ops),
        graph_fingerprint=graph.fingerprint,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=timeline.peak_bytes,
        plain_peak_bytes=context.plain.peak_bytes,
        resident_bytes=graph.resident_bytes,
        start_bytes=graph.start_bytes,
        activation_bytes=activation_bytes(graph, costs),
        passes=passes(graph),
        predicted_step_ms=timeline.step_ms,
        plain_step_ms=costs.plain_step_ms,
        # The bound is a float from another sum of the same terms.
        bound_ms=None if bound is None else min(bound.step_ms, timeline.step_ms),
        status=candidate.status,
        solve_s=0.0 if start_s is None else time.perf_counter() - start_s,
        device=graph.device,
        calls=graph.calls,
        region=graph.region,
        bound_model="" if bound is None else MOVES_HOLD_FOR if candidate.capacities else HOLDS_FOR,
        max_inflight_bytes=candidate.moves.max_inflight_bytes,
        written_parameters=graph.written_parameters,
        evidence=evidence(context, candidate, timeline, None if bound is None else bound.ms_per_byte),
        provenance={**graph.provenance, **candidate.provenance, **searched},
    )


def with_decisions_of(plan: Plan, graph: StepGraph, costs: Costs) -> Plan:
    """The same decisions for another graph of the same forward ops, with what they come to there.

    Raises:
        LowtideError: they take more than the budget there.
    """
    candidate = Candidate(plan.action_of(), plan.status, replays=plan.replays_of(), moves=plan.moves)
    found = build_plan(
        SearchContext(graph, costs), candidate, method=plan.method, budget_bytes=plan.budget_bytes,
        budget_kind=plan.budget_kind, bounded=False,
    )  # fmt: skip
    if found.budget_bytes is not None and found.budgeted_peak_bytes > found.budget_bytes:
        raise LowtideError(f"the decisions take {found.budgeted_peak_bytes} bytes of {found.budget_bytes} there.")
    return replace(found, bound_ms=found.plain_step_ms) if plan.keeps_everything else found
