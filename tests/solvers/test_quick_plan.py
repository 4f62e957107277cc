"""The quick plan is the fastest of the published methods' plans within the budget."""

import pytest
from support.toy_graphs import decoder, decoder_costs

from lowtide.errors import BudgetInfeasibleError
from lowtide.simulation.simulator import simulate
from lowtide.solvers import tuning
from lowtide.solvers.arguments import absolute_bytes
from lowtide.solvers.dispatch import solve
from lowtide.solvers.quick_plan import quick_plan

METHODS = ("none", "full", "every_n", "sqrt_n", "selective", "revolve")


def published(graph, costs, budget_bytes, methods=METHODS):
    plans = []
    for method in methods:
        try:
            plans.append(solve(graph, costs, budget_bytes, method=method))
        except BudgetInfeasibleError:
            continue
    return plans


@pytest.mark.parametrize("budget", ("100%", "75%", "60%", "50%", "30%"))
def test_no_published_method_is_faster(budget):
    graph = decoder(4)
    costs = decoder_costs(graph)
    budget_bytes = absolute_bytes(graph, costs, budget)

    plan, others = quick_plan(graph, costs, budget_bytes), published(graph, costs, budget_bytes)

    assert (plan is None) == (not others) == (budget == "30%")
    if plan is not None:
        assert plan.predicted_step_ms == min(other.predicted_step_ms for other in others)
        assert plan.method in METHODS
        assert simulate(graph, costs, plan).peak_bytes == plan.predicted_peak_bytes <= budget_bytes


def test_a_large_step_gets_along_without_the_slow_methods(monkeypatch):
    graph = decoder(4)
    costs = decoder_costs(graph)
    budget_bytes = absolute_bytes(graph, costs, "60%")
    monkeypatch.setattr(tuning, "QUICK_REVOLVE_OPS", len(graph.ops) - 1)

    plan = quick_plan(graph, costs, budget_bytes)

    fixed = published(graph, costs, budget_bytes, [m for m in METHODS if m != "revolve"])
    assert plan.predicted_step_ms == min(other.predicted_step_ms for other in fixed)
    assert plan.method != "revolve"
