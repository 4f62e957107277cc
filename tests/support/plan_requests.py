"""Requests to the planner, and the plans that ``solve`` makes of them."""

from dataclasses import replace

from support.toy_graphs import decoder, decoder_costs

from lowtide.plan import Plan
from lowtide.planning.plan_request import PlanRequest
from lowtide.solvers.dispatch import solve


def decoder_request(budget: int | str | None = "50%", *, layers: int = 2, **changes) -> PlanRequest:
    graph = decoder(layers)
    return PlanRequest(graph, decoder_costs(graph), budget, **changes)


def solved(request: PlanRequest) -> Plan:
    return solve(
        request.graph, request.costs, request.budget,
        method=request.method, offload=request.offload, **request.options,
    )  # fmt: skip


def text_of(plan: Plan) -> str:
    """Every byte of the plan but the time that solving took."""
    return replace(plan, solve_s=0.0).to_json()
