"""A good plan at once, from relaxations alone, and then the plan of ``solve``."""

from collections import OrderedDict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.case_graphs import load_case
from support.quick import examples, thorough_but
from support.strategies import small_graphs
from support.toy_graphs import unit_costs

from lowtide.errors import BudgetInfeasibleError
from lowtide.simulation.simulator import simulate, simulate_actions
from lowtide.solvers import least_peak, tuning
from lowtide.solvers.dispatch import solve
from lowtide.solvers.exact import ExactSearch
from lowtide.solvers.improving_plans import improving_plans
from lowtide.solvers.lower_bound.bound import bound_peak
from lowtide.solvers.milp.highs import LinearProgram

CASES = ("vit", "decoder8_512", "toy")


@pytest.mark.parametrize("case", thorough_but(("decoder8_512",), CASES))
def test_the_last_plan_is_that_of_solve(case):
    graph, costs = load_case(case)

    plans = list(improving_plans(graph, costs, "25%"))

    assert plans[-1].decisions == solve(*load_case(case), "25%").decisions
    assert plans[-1].bound_ms is not None


@pytest.mark.parametrize("case", thorough_but(("decoder8_512",), CASES))
@pytest.mark.parametrize("budget", ("50%", "25%"))
def test_the_first_plan_solves_no_program_with_whole_decisions_and_is_within_two_percent(case, budget, monkeypatch):
    graph, costs = load_case(case)
    best_ms = solve(graph, costs, budget).predicted_step_ms
    graph, costs = load_case(case)
    monkeypatch.setattr(LinearProgram, "minimise", None)

    first = next(improving_plans(graph, costs, budget))

    assert first.predicted_step_ms <= 1.02 * best_ms
    assert first.predicted_peak_bytes <= first.budget_bytes


def test_of_a_large_step_a_published_plan_comes_before_any_model_is_built(monkeypatch):
    """A loss that goes through its rows in a loop is a segment whose first columns take seconds."""
    graph, costs = load_case("decoder32")
    assert len(graph.events) >= tuning.PUBLISHED_FIRST_EVENTS > len(load_case("decoder8_512")[0].events)
    plans = improving_plans(graph, costs, "40%")
    with monkeypatch.context() as without_models:
        without_models.setattr(ExactSearch, "_models", property(lambda _: pytest.fail("a model was built")))
        at_once = next(plans)

    assert at_once.predicted_peak_bytes <= at_once.budget_bytes and at_once.bound_ms is None
    monkeypatch.setattr(LinearProgram, "minimise", None)
    better = next(plans)
    assert better.predicted_step_ms < at_once.predicted_step_ms and better.bound_ms is None


@pytest.mark.parametrize("case", thorough_but(("chain48",), ("chain48", "toy")))
def test_near_the_least_peak_there_is_a_first_plan_before_the_search_for_it_ends(case, monkeypatch):
    graph, costs = load_case(case)
    with pytest.raises(BudgetInfeasibleError) as error:
        solve(graph, costs, graph.resident_bytes)
    budget = error.value.least_bytes + (error.value.least_bytes - graph.resident_bytes) // 20
    graph, costs = load_case(case)
    monkeypatch.setattr(ExactSearch, "within", None)

    first = next(improving_plans(graph, costs, budget))

    assert first.predicted_peak_bytes <= budget


def test_the_least_that_an_error_named_has_its_plan_at_once(monkeypatch):
    graph, costs = load_case("chain48")
    with pytest.raises(BudgetInfeasibleError) as error:
        solve(graph, costs, graph.resident_bytes)
    graph, costs = load_case("chain48")
    monkeypatch.setattr(ExactSearch, "within", None)
    monkeypatch.setattr(ExactSearch, "_chain_within", lambda *_: pytest.fail("searched for what is known"))

    first = next(improving_plans(graph, costs, error.value.least_bytes))

    assert first.predicted_peak_bytes <= error.value.least_bytes


def test_a_step_that_is_one_model_has_a_first_plan_within_two_percent(monkeypatch):
    graph, costs = load_case("unet")
    best_ms = solve(graph, costs, "40%").predicted_step_ms
    graph, costs = load_case("unet")
    monkeypatch.setattr(LinearProgram, "minimise", None)

    assert next(improving_plans(graph, costs, "40%")).predicted_step_ms <= 1.02 * best_ms


@settings(max_examples=examples(60), deadline=None)
@given(graph=small_graphs(), data=st.data())
def test_plans_are_within_the_budget_and_none_is_slower_than_the_one_before(graph, data):
    costs = unit_costs(graph)
    budget = data.draw(st.integers(graph.resident_bytes + 1, simulate(graph, costs, {}).peak_bytes))
    try:
        plans = list(improving_plans(graph, costs, budget))
    except BudgetInfeasibleError as error:
        plans = list(improving_plans(graph, costs, error.least_bytes))
        budget = error.least_bytes

    assert all(plan.predicted_peak_bytes <= budget for plan in plans)
    assert all(later.predicted_step_ms <= before.predicted_step_ms for before, later in pairwise(plans))
    for plan in plans:
        actions = {d.storage: d.action for d in plan.decisions}
        line = simulate_actions(graph, costs, actions, {d.storage: d.replays for d in plan.decisions})
        assert (line.peak_bytes, line.step_ms) == (plan.predicted_peak_bytes, plan.predicted_step_ms)


def test_costs_of_another_graph_and_impossible_budgets_are_refused_as_solve_refuses_them():
    _, costs = load_case("vit")
    other, _ = load_case("unet")

    with pytest.raises(ValueError, match="costs has times for 1911 ops, the graph has 357 ops. Measure this graph."):
        next(improving_plans(other, costs, "50%"))
    with pytest.raises(BudgetInfeasibleError):
        next(improving_plans(*load_case("unet"), other.resident_bytes))


@pytest.mark.parametrize("budget", ("50%", "25%"))
def test_the_first_effort_gives_the_first_plan_without_a_bound(budget):
    first = solve(*load_case("vit"), budget, effort="first")

    assert first.decisions == next(improving_plans(*load_case("vit"), budget)).decisions
    assert first.bound_ms is None and first.predicted_peak_bytes <= first.budget_bytes


def test_near_the_least_peak_the_first_effort_refuses_and_names_what_it_can_do(monkeypatch):
    monkeypatch.setattr(least_peak, "_least", OrderedDict())  # what an earlier search found is known at once
    graph, costs = load_case("vit")
    proven = bound_peak(graph)

    with pytest.raises(BudgetInfeasibleError, match='or use effort="full"') as caught:
        solve(graph, costs, proven, effort="first")

    assert caught.value.proven_bytes == proven < caught.value.least_bytes
    plan = solve(graph, costs, caught.value.least_bytes, effort="first")
    assert plan.predicted_peak_bytes <= caught.value.least_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"effort": "quick"}, "effort='quick' is not known. Use 'full' or 'first'."),
        (
            {"effort": "first", "offload": ("disk",)},
            "effort='first' has no meaning with offload=('disk',). Leave one of them out.",
        ),
        (
            {"effort": "first", "method": "full"},
            "effort='first' has no meaning for method='full'. Leave it out, or use method=\"exact\".",
        ),
    ],
)
def test_an_effort_without_a_meaning_is_refused(options, message):
    graph, costs = load_case("toy")

    with pytest.raises(ValueError) as caught:
        solve(graph, costs, "50%", **options)

    assert str(caught.value) == message
