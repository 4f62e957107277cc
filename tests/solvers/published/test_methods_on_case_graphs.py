"""The exact method is as fast as every published method at that method's own peak, within its tolerance, on cases."""

import pytest
from support.case_graphs import load_case
from support.quick import thorough_but

from lowtide.errors import BudgetInfeasibleError
from lowtide.simulation.simulator import simulate_actions
from lowtide.solvers import tuning
from lowtide.solvers.dispatch import solve
from lowtide.solvers.exact import ExactSearch
from lowtide.solvers.published.methods import BUDGETED, PUBLISHED
from lowtide.solvers.search_context import Limits, SearchContext

SEARCHED = ("toy", "chain48", "decoder8_512", "decoder8_4096", "vit", "lora")  # the others take minutes
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
        # A search stops within its tolerance, so a plan made for this very budget may be a little faster.
        slack_ms = tuning.STEP_GAP * costs.plain_step_ms if method in BUDGETED else 1e-9
        if ours.step_ms > plan.predicted_step_ms + slack_ms:
            yield method, plan.predicted_step_ms, ours.step_ms


@pytest.mark.parametrize("name", thorough_but(("chain48",), SEARCHED))
def test_exact_is_at_least_as_fast_as_every_published_method_on_a_case(name):
    graph, costs = load_case(name)
    search = ExactSearch(SearchContext(graph, costs, Limits(multi_segment=False, node_limit=20, time_limit_s=600.0)))

    assert list(faster_than(search, graph, costs)) == []
