"""A published method that fails on a graph is left out, and says so; it never ends the exact search."""

import logging
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from support.case_graphs import load_case
from support.quick import thorough_but
from support.toy_graphs import decoder, decoder_costs
from support.training_steps import mlp

import lowtide
from lowtide.errors import BudgetInfeasibleError, PlanMismatchError
from lowtide.estimation.device_table import device_named
from lowtide.foresight.step_planner import StepPlanner
from lowtide.reports.html import front_picture
from lowtide.reports.trade_off import trade_off
from lowtide.solvers import least_peak
from lowtide.solvers.published import methods

GRAPH = decoder(layers=3)
COSTS = decoder_costs(GRAPH)
ERRORS = (IndexError, RuntimeError, RecursionError, ValueError, MemoryError, PlanMismatchError)
# ``none`` is the step itself.
FAILING = tuple(method for method in methods.PUBLISHED if method != "none")


def when_listed(method, error, monkeypatch):
    def fails(*_: object) -> None:
        raise error("on purpose")

    if method in methods.FIXED:
        monkeypatch.setitem(methods.FIXED, method, fails)
    else:
        monkeypatch.setattr(methods, method, fails)


def when_worked_out(method, error, monkeypatch):
    """The method lists its plans, and fails when one of them is asked for; a fixed one has a plan that no graph has."""

    def fails() -> None:
        raise error("on purpose")

    if method in methods.FIXED:
        monkeypatch.setitem(methods.FIXED, method, lambda graph: {len(graph.storages): "recompute"})
    else:
        plans_of = getattr(methods, method)
        listed = lambda *given: [replace(lazy, candidate=fails) for lazy in plans_of(*given)]  # noqa: E731
        monkeypatch.setattr(methods, method, listed)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """The least peaks of earlier searches, which would spare this one its start."""
    monkeypatch.setattr(least_peak, "_least", type(least_peak._least)())


@pytest.fixture(scope="module")
def undisturbed():
    """Plans with every method: at 70 %, at 40 %, and at the least there is."""
    with pytest.raises(BudgetInfeasibleError) as caught:
        lowtide.solve(GRAPH, COSTS, GRAPH.resident_bytes + 1)
    return [lowtide.solve(GRAPH, COSTS, budget) for budget in ("70%", "40%", caught.value.least_bytes)]


@pytest.mark.parametrize("fails", [when_listed, when_worked_out])
@pytest.mark.parametrize(("method", "error"), list(zip(FAILING, cycle(ERRORS))))
def test_the_exact_search_goes_on_without_it(method, fails, error, undisturbed, caplog, monkeypatch):
    fails(method, error, monkeypatch)
    caplog.set_level(logging.INFO, logger="lowtide")

    for before in undisturbed:
        plan = lowtide.solve(GRAPH, COSTS, before.budget_bytes)
        assert plan.predicted_peak_bytes <= before.budget_bytes
        assert plan.predicted_step_ms <= before.predicted_step_ms + 1e-9
    if method != "knapsack":  # no search begins with it
        assert f"method {method} left out of the search: " in caplog.text


@pytest.mark.parametrize("error", ERRORS)
def test_no_kind_of_error_ends_it(error, undisturbed, monkeypatch):
    for method in FAILING:
        when_listed(method, error, monkeypatch)

    found = lowtide.solve(GRAPH, COSTS, undisturbed[0].budget_bytes, effort="first")

    assert found.predicted_peak_bytes <= undisturbed[0].budget_bytes


@pytest.mark.parametrize("fails", [when_listed, when_worked_out])
def test_the_exact_search_needs_none_of_them(fails, undisturbed, monkeypatch):
    for method in FAILING:
        fails(method, RecursionError, monkeypatch)

    plan = lowtide.solve(GRAPH, COSTS, undisturbed[1].budget_bytes)
    assert plan.predicted_step_ms <= undisturbed[1].predicted_step_ms + 1e-9
    with pytest.raises(BudgetInfeasibleError):
        lowtide.solve(GRAPH, COSTS, GRAPH.resident_bytes + 1)
    traced = lowtide.trace(mlp(2, 8), torch.randn(4, 8))
    assert len(StepPlanner(traced, device_named("h100")).known) == 1  # the plain step


@pytest.mark.parametrize("method", methods.PUBLISHED)
def test_asked_for_by_name_it_says_that_it_does_not_apply(method, monkeypatch):
    graph, costs = load_case("minilm")
    when_listed(method, IndexError, monkeypatch)

    with pytest.raises(ValueError, match=f"method={method!r} does not apply to this step: IndexError: on purpose"):
        lowtide.solve(graph, costs, method=method, budget="90%" if method in methods.BUDGETED else None)


@pytest.mark.parametrize("method", methods.BUDGETED)
def test_it_says_so_too_where_a_plan_of_it_cannot_be_worked_out(method, monkeypatch):
    when_worked_out(method, RecursionError, monkeypatch)

    with pytest.raises(ValueError, match=f"method={method!r} does not apply to this step: RecursionError: on purpose"):
        lowtide.solve(GRAPH, COSTS, "70%", method=method)


@pytest.mark.parametrize("method", thorough_but(("full", "rotor"), FAILING))
def test_the_table_of_methods_names_what_is_left_out(method, monkeypatch):
    when_listed(method, RuntimeError, monkeypatch)

    found = trade_off(GRAPH, COSTS, points=2)

    why = f"method={method!r} does not apply to this step: RuntimeError: on purpose."
    assert found.left_out == found.as_json()["left_out"] == {method: why}
    assert method not in found.classics and "Left out: method=&#x27;" + method in front_picture(found)
