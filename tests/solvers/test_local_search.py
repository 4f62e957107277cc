"""Local search simulates the changes that may be best, and gives up where it cannot end below a limit."""

import math

import pytest
from support.case_graphs import load_case

from lowtide.solvers import local_search
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.local_search import descent
from lowtide.solvers.search_context import SearchContext


@pytest.fixture
def simulated(monkeypatch):
    """Grows by one with each simulated candidate."""
    found = []

    evaluate = SearchContext.evaluate

    def counted(*args):
        found.append(evaluate(*args))
        return found[-1]

    monkeypatch.setattr(SearchContext, "evaluate", counted)
    return found


def test_changes_that_cannot_be_the_cheapest_are_not_simulated(simulated, monkeypatch):
    graph, costs = load_case("vit")
    context = SearchContext(graph, costs)
    start = context.evaluate(complete_actions(graph, graph.stored))
    simulated.clear()
    path = list(descent(context, start, target_bytes=start.peak_bytes - 1, events=10**9))
    num_simulated = len(simulated)
    simulated.clear()
    monkeypatch.setattr(local_search, "_estimated_ms_per_byte", lambda *_: 0.0)

    of_all = list(descent(context, start, target_bytes=start.peak_bytes - 1, events=10**9))

    assert num_simulated < len(simulated)
    assert path[-1].rank == of_all[-1].rank


def test_a_descent_that_is_expected_to_end_above_its_limit_is_not_begun(simulated):
    graph, costs = load_case("vit")
    context = SearchContext(graph, costs)
    start = context.evaluate(complete_actions(graph, ()))
    target, limit_ms = start.peak_bytes // 2, 1.1 * start.timeline.step_ms
    price = 0.2 * start.timeline.step_ms / (start.peak_bytes - target)

    simulated.clear()

    limits = {"target_bytes": target, "max_ms": limit_ms, "least_ms_per_byte": price, "events": 10**6}
    given_up = list(descent(context, start, **limits))

    assert given_up == [start] and not simulated
    assert len(list(descent(context, start, target_bytes=target, max_ms=math.inf, events=10**6))) > 1
