"""From actions to a ``Plan``: the one place where a solver's choice is judged, priced and written down."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from lowtide.errors import BudgetInfeasibleError, LowtideError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE, SAVE, TIER_OF, Decision, Moves, Plan, PlannedOp
from lowtide.simulation.simulator import simulate_actions
from lowtide.solvers.lower_bound.bound import HOLDS_FOR, MOVES_HOLD_FOR, bound_peak, bound_peak_with_offload, bound_time
from lowtide.solvers.lower_bound.tighten_bound import tighten_bound
from lowtide.solvers.peak_report import bottleneck, evidence
from lowtide.units import format_bytes


@dataclass(frozen=True)
class Candidate:
    """A solver's answer before it is a plan.

    Attributes:
        replays: How often a recomputed storage may be made again, by storage id; 1 where absent (see ``Decision``).
        bound_ms: No plan among those that the method looks at has a shorter step; None where it does not know.
        status: ``optimal``, ``feasible`` or ``fixed``, as in ``Plan``.
        moves: When moved storages travel.
        capacities: Most bytes that plans that were looked at may move, by tier: the bound has to hold for those.
    """

    actions: dict[int, str]
    status: str = "fixed"
    bound_ms: float | None = None
    provenance: dict[str, str] = field(default_factory=dict)
    replays: dict[int, int] = field(default_factory=dict)
    moves: Moves = field(default_factory=Moves)
    capacities: Mapping[str, int | None] = field(default_factory=dict)


def build_plan(
    graph: StepGraph,
    costs: Costs,
    candidate: Candidate,
    *,
    method: str,
    budget_bytes: int | None,
    start_s: float,
    sharpen: bool = False,
) -> Plan:
    """Simulate ``draft`` and write it down.

    Args:
        start_s: ``time.perf_counter()`` when solving began.
        sharpen: Where the bound is far, take the time to bring it nearer.

    Raises:
        LowtideError: a solver came with a draft above its budget.
    """
    timeline = simulate_actions(graph, costs, candidate.actions, candidate.replays, candidate.moves)
    if budget_bytes is not None and timeline.peak_bytes > budget_bytes:
        raise LowtideError(
            f"method={method!r} came with a plan of {timeline.peak_bytes} bytes for a budget of {budget_bytes} bytes.\n"
            "This is a bug in lowtide. Another budget may do."
        )
    plain = simulate_actions(graph, costs, {})
    forward = {op.id: place for place, op in enumerate(graph.forward_ops)}
    finished = {op.completes_inplace for op in graph.forward_ops}
    decisions = []
    for storage_id, action in sorted(candidate.actions.items()):
        storage = graph.storages[storage_id]
        assert storage.op is not None
        replay_ms = costs.op_ms[storage.op] + costs.replay_us / 1e3 if action == RECOMPUTE else 0.0
        decisions.append(
            Decision(
                storage_id,
                action,
                storage.bytes,
                forward[storage.op],
                storage.output,
                storage_id in graph.stored,
                replay_ms,
                candidate.replays.get(storage_id, 1) if action == RECOMPUTE else 1,
                candidate.moves.fetch_at.get(storage_id) if action in TIER_OF else None,
            )
        )
    bound = None if budget_bytes is None else bound_time(graph, costs, budget_bytes, candidate.capacities)
    if sharpen and bound is not None and budget_bytes is not None and not candidate.capacities:
        bound = tighten_bound(graph, costs, budget_bytes, timeline.step_ms, bound)
    bound_ms = None if bound is None else bound.step_ms
    searched = {}
    if candidate.bound_ms is not None:
        searched["search_bound"] = f"{candidate.bound_ms:.3f} ms for the plans that method {method} looks at"
    return Plan(
        method=method,
        decisions=tuple(decisions),
        frames=graph.frames,
        ops=tuple(
            PlannedOp(
                op.name,
                op.frame,
                op.dynamic,
                None if op.completes_inplace is None else forward[op.completes_inplace],
                # An op that others finish counts their reads as its own, and does not get them itself.
                0 if op.id in finished else sum(candidate.actions.get(s, SAVE) != SAVE for s in op.reads),
            )
            for op in graph.forward_ops
        ),
        graph_fingerprint=graph.fingerprint,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=timeline.peak_bytes,
        plain_peak_bytes=plain.peak_bytes,
        resident_bytes=graph.resident_bytes,
        predicted_step_ms=timeline.step_ms,
        plain_step_ms=costs.plain_step_ms,
        # The bound is a float from another sum of the same terms.
        bound_ms=None if bound_ms is None else min(bound_ms, timeline.step_ms),
        status=candidate.status,
        solve_s=time.perf_counter() - start_s,
        device=graph.device,
        calls=graph.calls,
        region=graph.region,
        bound_model="" if bound is None else MOVES_HOLD_FOR if candidate.capacities else HOLDS_FOR,
        max_inflight_bytes=candidate.moves.max_inflight_bytes,
        evidence=evidence(graph, candidate.actions, candidate.replays, timeline, bound, candidate.moves),
        written_parameters=graph.written_parameters,
        provenance={**graph.provenance, **candidate.provenance, **searched},
    )


def infeasible(
    graph: StepGraph,
    costs: Costs,
    budget_bytes: int,
    least: dict[int, str],
    *,
    method: str,
    replays: dict[int, int] | None = None,
    moves: Moves | None = None,
) -> BudgetInfeasibleError:
    """The error for a budget below what ``least`` (with ``replays`` and ``moves``), the leanest the method has, needs.

    Args:
        moves: Given where the method may move storages: then no bound of plans that move nothing is quoted.
    """
    timeline = simulate_actions(graph, costs, least, replays, moves)
    need = format_bytes(timeline.peak_bytes)
    asked, found = format_bytes(budget_bytes), f"{need} ({timeline.peak_bytes} bytes)"
    lines = [f"no plan fits budget={asked}: method={method!r} needs at least {found}."]
    proven = 0 if method != "exact" else bound_peak(graph) if moves is None else bound_peak_with_offload(graph)
    if method == "exact" and moves is not None:
        lines = [f"no plan found fits budget={asked}: the leanest, other tiers used, needs {found}."]
        if proven > budget_bytes:
            floor = f"{format_bytes(proven)} ({proven} bytes)"
            lines = [f"no plan fits budget={asked}, other tiers used: every plan needs at least {floor}.",
                     f"The leanest found needs {found}."]  # fmt: skip
    elif method == "exact":
        floor = f"{format_bytes(proven)} ({proven} bytes)"
        if proven == timeline.peak_bytes:
            lines = [f"no plan fits budget={asked}: every plan needs at least {found}."]
        elif proven > budget_bytes:
            lines = [f"no plan fits budget={asked}: every plan needs at least {floor}, the leanest found {found}."]
        else:
            lines = [f"no plan found fits budget={asked}: the leanest needs {found}, none less than {floor}."]
    rows = [(part, format_bytes(count)) for part, count in graph.resident.items() if count]
    rows.append(("bottleneck", bottleneck(graph, least, replays or {}, timeline, moves)))
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name:<{width}}  {value}" for name, value in rows]
    other = "reduce the batch" if method == "exact" else 'use method="exact"'
    lines.append(f"Raise the budget to {timeline.peak_bytes} bytes or more, or {other}.")
    return BudgetInfeasibleError(
        "\n".join(lines), budget_bytes=budget_bytes, least_bytes=timeline.peak_bytes, proven_bytes=proven
    )
