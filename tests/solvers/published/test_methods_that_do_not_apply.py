"""A published method that fails on a graph is left out, and says so; it never ends the exact search."""

import logging

import pytest
from support.case_graphs import load_case

import lowtide
from lowtide.solvers.published import methods


@pytest.mark.parametrize("method", methods.PUBLISHED)
def test_the_exact_search_goes_on_without_it(method, caplog, monkeypatch):
    graph, costs = load_case("minilm")

    def fails(*_: object) -> None:
        raise IndexError("on purpose")

    if method in methods.FIXED:
        monkeypatch.setitem(methods.FIXED, method, fails)
    else:
        monkeypatch.setattr(methods, method, fails)
    caplog.set_level(logging.INFO, logger="lowtide")

    plan = lowtide.solve(graph, costs, budget="90%")
    assert plan.predicted_peak_bytes < plan.plain_peak_bytes
    with pytest.raises(ValueError, match=f"method={method!r} does not apply to this step: IndexError: on purpose"):
        lowtide.solve(graph, costs, method=method, budget="90%" if method in methods.BUDGETED else None)
    assert f"method {method} left out: IndexError: on purpose" in caplog.text
