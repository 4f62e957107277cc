"""Plans that the bound's relaxation points to: within the budget, ever faster, better than what is planned alone."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.case_graphs import load_case
from support.quick import examples
from support.strategies import small_cases

from lowtide.simulation.simulator import simulate, simulate_actions
from lowtide.solvers import tuning
from lowtide.solvers.exact import ExactSearch
from lowtide.solvers.lower_bound.bound import bound_time
from lowtide.solvers.lp_rounding import round_relaxation
from lowtide.solvers.search_context import SearchContext


@settings(max_examples=examples(100), deadline=None)
@given(case=small_cases(), data=st.data())
def test_what_is_found_is_within_the_budget_and_each_faster_than_the_one_before(case, data):
    graph, costs = case
    peak = simulate(graph, costs, {}).peak_bytes
    budget = data.draw(st.integers(0, peak))

    found = round_relaxation(SearchContext(graph, costs), budget, most_ms=math.inf, enough_ms=0.0)

    for evaluated in found:
        line = simulate_actions(graph, costs, evaluated.actions, evaluated.replays)
        assert line.peak_bytes == evaluated.peak_bytes <= budget
        assert (
            line.step_ms == evaluated.timeline.step_ms >= bound_time(SearchContext(graph, costs), budget).step_ms - 1e-6
        )
    assert all(after.timeline.step_ms < before.timeline.step_ms for before, after in pairwise(found))


def at_36_percent(graph, costs):
    plain = simulate(graph, costs, {}).peak_bytes
    return graph.resident_bytes + int((plain - graph.resident_bytes) * 0.36)


def test_a_relaxation_is_rounded_to_a_plan_within_a_percent_of_the_bound(monkeypatch):
    graph, costs = load_case("autocast")
    budget = at_36_percent(graph, costs)
    bound_ms = bound_time(SearchContext(graph, costs), budget).step_ms

    found = round_relaxation(SearchContext(graph, costs), budget, most_ms=1.05 * bound_ms, enough_ms=1.01 * bound_ms)

    assert found and found[-1].timeline.step_ms <= 1.01 * bound_ms and found[-1].peak_bytes <= budget
    monkeypatch.setattr(tuning, "LP_ROUNDING_OPS", len(graph.ops) - 1)
    assert round_relaxation(SearchContext(graph, costs), budget, most_ms=math.inf, enough_ms=bound_ms) == []


@pytest.mark.thorough
def test_where_layers_planned_apart_stay_far_from_the_bound_exact_asks_its_relaxation(monkeypatch):
    graph, costs = load_case("autocast")
    budget = at_36_percent(graph, costs)
    alone = ExactSearch(SearchContext(graph, costs)).within(budget)
    monkeypatch.setattr(tuning, "FAR_FROM_BOUND", tuning.NEAR_BOUND)

    search = ExactSearch(SearchContext(graph, costs))
    asked = search.within(budget)

    times = [
        search.context.evaluate(candidate.actions, candidate.replays).timeline.step_ms for candidate in (alone, asked)
    ]
    assert times[1] < times[0] - 0.002 * costs.plain_step_ms
