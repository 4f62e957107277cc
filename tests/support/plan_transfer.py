"""A plan for one shape carried over to another of the same structure: the same decisions, with new predictions.

Decisions are about ops and storages, not bytes. Which storages live at an event depends on decisions and structure
alone (``graph/structure.py``), unless storages travel to other tiers, which takes time that depends on bytes. So where
no storage of the other graph is larger, its peak is no higher: a plan for a shape serves every shape that it covers.
The simulator says the new peak; nobody has to believe this.
"""

import time
from dataclasses import replace

from lowtide.errors import PlanMismatchError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.search_context import SearchContext
from lowtide.units import format_bytes


def plan_for(graph: StepGraph, costs: Costs, plan: Plan) -> Plan:
    """The decisions of ``plan`` as a plan for ``graph``, simulated there. No bound is known for it.

    Args:
        costs: Of ``graph``.
        plan: Made for a graph of the same structure. Its budget, if it has one, holds here too.

    Raises:
        PlanMismatchError: ``plan`` is for other ops, or its decisions need more than its budget on ``graph``.
    """
    start_s = time.perf_counter()
    if difference := _difference(plan, graph):
        raise PlanMismatchError(f"the plan is for another step: {difference}. Plan this one.")
    candidate = Candidate(
        plan.action_of(),
        replays=plan.replays_of(),
        moves=plan.moves,
        provenance={"transferred": f"from graph {plan.graph_fingerprint}"},
    )
    # Without a budget: a bound would take longer than all the rest.
    found = build_plan(SearchContext(graph, costs), candidate, method=plan.method, start_s=start_s)
    found = replace(found, budget_bytes=plan.budget_bytes, budget_kind=plan.budget_kind)
    if plan.budget_bytes is not None and found.budgeted_peak_bytes > plan.budget_bytes:
        raise PlanMismatchError(
            f"the plan keeps {format_bytes(plan.budget_bytes)} for the shape that it was made for, and would need "
            f"{format_bytes(found.budgeted_peak_bytes)} for this one. Plan for this shape, or for one that covers it."
        )
    return found


def _difference(plan: Plan, graph: StepGraph) -> str:
    """The first thing of ``graph`` that ``plan`` was not made for, in words; "" if there is none."""
    forward = graph.forward_ops
    if tuple(plan.frames) != tuple(graph.frames):
        return f"its {len(plan.frames)} module calls are not the graph's {len(graph.frames)}"
    if len(plan.ops) != len(forward):
        return f"it has {len(plan.ops)} forward ops, the graph {len(forward)}"
    for at, (planned, op) in enumerate(zip(plan.ops, forward)):
        completes = None if planned.completes_inplace is None else forward[planned.completes_inplace].id
        if (planned.name, planned.frame, completes) != (op.name, op.frame, op.completes_inplace):
            return f"forward op {at} is {planned.name} in the plan and {op.name} in the graph"
    for d in plan.decisions:
        if not 0 <= d.storage < len(graph.storages):
            return f"it decides on storage {d.storage}, the graph has {len(graph.storages)}"
        storage = graph.storages[d.storage]
        if (storage.op, storage.output) != (forward[d.op].id, d.output):
            return f"storage {d.storage} is made elsewhere"
    return ""
