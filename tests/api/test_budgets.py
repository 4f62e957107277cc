"""Budgets in every form, and what ``fit``, ``verify`` and ``report`` predict beside what is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.memory_limit import limited
from support.training_steps import (
    deep,
    harshest,
    is_clean,
    mlp,
    tight,
)

import lowtide
from lowtide import BudgetInfeasibleError
from lowtide.measurement.allocator import peak_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("budget", ["80%", "62.5%", "6GiB", "1.5 GB", 2**30, "auto"])
def test_every_form_of_budget_is_absolute_in_the_plan(budget):
    model, x = mlp(6, 32), torch.randn(64, 32)
    fit = lowtide.fit(model, x, budget=budget)
    plan = fit.plan
    fit.remove()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    later = lowtide.trace(model, x)  # where gradients come, activations go: percentages are of a step that has them
    times = lowtide.measure(later)
    plain_activation = lowtide.simulate(later, times, {}).peak_bytes - later.resident_bytes

    if isinstance(budget, str) and budget.endswith("%"):
        assert plan.budget_bytes == plan.resident_bytes + int(float(budget[:-1]) / 100 * plain_activation)
    elif budget == "auto":
        assert plan.budget_bytes > plan.plain_peak_bytes
    else:
        assert plan.budget_bytes == {"6GiB": 6 * 2**30, "1.5 GB": 1_500_000_000, 2**30: 2**30}[budget]
    assert plan.predicted_peak_bytes <= plan.budget_bytes


def test_asking_for_the_least_bytes_succeeds_and_one_fewer_does_not():
    model, x = mlp(6, 32), torch.randn(64, 32)
    with pytest.raises(BudgetInfeasibleError) as error:
        lowtide.fit(model, x, budget="1%")
    least = error.value.least_bytes

    fit = lowtide.fit(model, x, budget=least)
    fit.remove()

    assert error.value.budget_bytes < least
    assert fit.plan.predicted_peak_bytes == least
    with pytest.raises(BudgetInfeasibleError):
        lowtide.fit(model, x, budget=least - 1)


@pytest.mark.parametrize("given", ["adamw", "fresh", "used"])
def test_the_optimizers_state_counts(given):
    model, x = mlp(), torch.randn(4, 16)
    optimizer: Any = given
    if given != "adamw":
        optimizer = torch.optim.AdamW(model.parameters())
    if given == "used":
        model(x).sum().backward()
        optimizer.step()
    elements = sum(p.numel() for p in model.parameters())

    without = lowtide.trace(model, x)
    graph = lowtide.trace(model, x, optimizer=optimizer)

    assert graph.resident["optimizer"] == 2 * 4 * elements
    assert graph.resident_bytes - without.resident_bytes == 2 * 4 * elements


def test_the_predicted_peak_is_what_a_training_loop_measures():
    model, x = deep(64), torch.randn(128, 64)
    for percent in (100, 70):
        fit = lowtide.fit(model, x, budget=f"{percent}%")
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for _ in range(2):

            def step() -> None:
                out = model(x)
                out.square().mean().backward()

            measured = fit.plan.resident_bytes + peak_bytes(step)
            assert fit.status().in_force
            assert abs(measured - fit.plan.predicted_peak_bytes) <= 0.001 * fit.plan.predicted_peak_bytes
        fit.remove()


def test_fit_verify_and_report_agree():
    fit = tight(model := mlp(6, 32), x := torch.randn(64, 32))
    proof = fit.verify(x, rounds=1)
    fit.remove()

    assert proof.equal, proof.differing
    assert proof.gradients_bitwise_equal
    assert proof.mismatched_ops == 0
    assert proof.proven_ops == proof.dropped_ops > 0
    assert abs(proof.measured_peak_bytes - proof.predicted_peak_bytes) <= 0.001 * proof.predicted_peak_bytes
    assert "recompute" in fit.report(measure=False)
    assert is_clean(model)


def test_verify_sees_a_gradient_that_differs(monkeypatch):
    from lowtide.tape import replay, tape

    model, x = mlp(), torch.randn(4, 16)
    plan = harshest(model, x)
    monkeypatch.setattr(tape, "unpacked", lambda stands: replay.unpacked(stands) + 1e-3)

    proof = lowtide.verify(model, x, plan, rounds=0)

    assert not proof.gradients_bitwise_equal
    assert not proof.equal
    assert "gradient of 0.weight" in proof.differing


@pytest.mark.slow
def test_fit_and_its_step_work_where_the_plain_step_does_not_fit():
    assert limited(900) == "no memory\n"
    assert limited(900, "budget=30%") == "trained True\n"
