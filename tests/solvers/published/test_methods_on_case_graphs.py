"""The exact method is as fast as every published method at that method's own peak, on the committed cases."""

from dataclasses import replace

import pytest
from support.case_graphs import EXPECTED, load_case

from lowtide.errors import BudgetInfeasibleError
from lowtide.simulation.simulator import simulate_actions
from lowtide.solvers.dispatch import solve
from lowtide.solvers.exact import ExactSearch
from lowtide.solvers.published.methods import BUDGETED, PUBLISHED
from lowtide.solvers.search_context import Limits

SEARCHED = ("toy", "chain48", "decoder8_512", "decoder8_4096", "vit", "lora")  # the others take minutes
DEEP = ("decoder32", "decoder100", "decoder126")  # there it takes seconds to list what the knapsack and rotor would do
BUDGET = "45%"


def published(graph, costs):
    """Plans by method, one for ``BUDGET`` where the method has a plan for each."""
    for method in PUBLISHED[1:]:
        try:
            yield method, solve(graph, costs, BUDGET if method in BUDGETED else None, method=method)
        except (BudgetInfeasibleError, ValueError):  # it does not fit, or no layer repeats
            continue


def faster_than(search, graph, costs):
    """Of ``published`` those that beat what ``search`` finds at their peak."""
    for method, plan in published(graph, costs):
        candidate = search.within(plan.predicted_peak_bytes)
        ours = simulate_actions(graph, costs, candidate.actions, candidate.replays)
        assert ours.peak_bytes <= plan.predicted_peak_bytes
        if ours.step_ms > plan.predicted_step_ms + 1e-9:
            yield method, plan.predicted_step_ms, ours.step_ms


@pytest.mark.parametrize("name", SEARCHED)
def test_exact_is_at_least_as_fast_as_every_published_method_on_a_case(name):
    graph, costs = load_case(name)
    search = ExactSearch(graph, costs, Limits(multi_segment=False, node_limit=20, time_limit_s=600.0))

    assert list(faster_than(search, graph, costs)) == []


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in DEEP])
def test_a_search_that_stops_just_above_a_published_method_is_shown_its_plan(name):
    graph, costs = load_case(name)
    search = ExactSearch(graph, costs, Limits())

    compared = 0
    for method, plan in published(graph, costs):
        theirs = search.context.evaluate(plan.action_of(), plan.replays_of())
        above = replace(theirs, timeline=replace(theirs.timeline, step_ms=theirs.timeline.step_ms + 1e-3))
        known = [*search._classics_that_may_beat(above, theirs.peak_bytes), *search._offered(theirs.peak_bytes)]
        assert min(j.rank for j in known) <= theirs.rank, method
        assert all(j.peak_bytes <= theirs.peak_bytes for j in known)
        compared += 1
    assert compared >= 2
