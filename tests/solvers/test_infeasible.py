"""A budget below what lives through the whole step is refused before anything is searched."""

import pickle

import pytest
from support.case_graphs import load_case
from support.toy_graphs import decoder, unit_costs

from lowtide.errors import BudgetInfeasibleError
from lowtide.solvers import dispatch
from lowtide.solvers.dispatch import solve


def test_a_budget_below_the_residents_is_refused_without_a_search(monkeypatch):
    graph, costs = load_case("decoder126")
    monkeypatch.setattr(dispatch, "_best_plans", lambda *_: pytest.fail("searched"))

    with pytest.raises(BudgetInfeasibleError) as caught:
        solve(graph, costs, graph.resident_bytes - 1)

    first, *parts, last = str(caught.value).splitlines()
    assert first.endswith(f"({graph.resident_bytes} bytes) live through the whole step.")
    assert len(parts) == sum(count > 0 for count in graph.resident.values())
    assert last == "Raise the budget, keep fewer bytes for each parameter, or shard the model."


@pytest.mark.parametrize("method", ["exact", "full"])
def test_its_least_peak_is_searched_for_when_somebody_asks_and_then_succeeds(method):
    graph = decoder()
    costs = unit_costs(graph)

    with pytest.raises(BudgetInfeasibleError) as caught:
        solve(graph, costs, graph.resident_bytes - 1, method=method)
    error = pickle.loads(pickle.dumps(caught.value))

    assert graph.resident_bytes <= error.least_bytes == caught.value.least_bytes
    assert error.proven_bytes <= error.least_bytes
    assert solve(graph, costs, error.least_bytes, method=method).predicted_peak_bytes == error.least_bytes
