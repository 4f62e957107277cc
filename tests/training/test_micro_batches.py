"""Gradients add up over micro-batches: the first one makes them, later ones find them there, and each has its plan."""

import copy

import pytest
import torch
from support.watched_training import Layered, activation_bytes, batch_of, bytes_of, resident_bytes

import lowtide
from lowtide.measurement.allocator import peak_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


def accumulated(model, micro_batches=3, steps=4, fit=None):
    """Losses, weights at the end, and each micro-batch's peak above weights, by micro-batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    x = batch_of()
    losses, peaks = [], [[] for _ in range(micro_batches)]
    for _ in range(steps):
        for n in range(micro_batches):
            there = bytes_of(p.grad for p in model.parameters() if p.grad is not None)

            def step():
                output = model(x)  # which lives on through backward, as in a rehearsal
                loss = output.square().mean() / micro_batches
                loss.backward()
                losses.append(loss.item())

            peaks[n].append(there + peak_bytes(step))
            if fit is not None:
                fit.wait()
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in model.parameters()], peaks


def same(a, b):
    return a[0] == b[0] and all(map(torch.equal, a[1], b[1]))


@pytest.mark.parametrize("first", ["watched", "rehearsed"])
def test_both_kinds_of_step_run_under_plans_of_their_own(first):
    model = Layered()
    plain = copy.deepcopy(model)
    weights, x = resident_bytes(model), batch_of()
    allowed = weights + int(0.75 * activation_bytes(model, x))
    with lowtide.fit(model, x if first == "rehearsed" else None, budget=weights + x.nbytes + allowed) as fit:
        found = accumulated(model, fit=fit)
        status = fit.status()
        making, adding = sorted(fit.plans, key=lambda plan: plan.before_bytes)
    expected = accumulated(plain)

    assert same(expected, found)
    assert status.in_force and status.shapes == 1 and status.plans == 2
    assert status.steps - status.planned_steps <= 1  # only what was watched
    assert (making.before_bytes, adding.before_bytes) == (weights + x.nbytes, 2 * weights + x.nbytes)
    assert adding.predicted_overhead > making.predicted_overhead
    for n, plan in ((0, making), (1, adding), (2, adding)):
        for peak in found[2][n][2:]:
            assert peak <= allowed + 5_000
            assert weights + x.nbytes + peak == pytest.approx(plan.predicted_peak_bytes, rel=0.01)


def test_one_set_of_decisions_serves_both_where_it_fits():
    model, x = Layered(), batch_of()
    budget = 3 * resident_bytes(model) + x.nbytes + 2 * activation_bytes(model, x)
    with lowtide.fit(model, x, budget=budget) as fit:
        accumulated(model, fit=fit)
        making, adding = sorted(fit.plans, key=lambda plan: plan.before_bytes)
        status = fit.status()

    assert making.keeps_everything and adding.keeps_everything
    assert adding.predicted_peak_bytes - making.predicted_peak_bytes > 0
    assert status.planned_steps == status.steps and status.planning_s == 0.0  # no planner was asked


def test_a_first_micro_batch_after_later_ones_does_with_less():
    """``fit`` in the middle of a training: gradients are there, and ``zero_grad`` frees them afterwards."""
    model, x = Layered(), batch_of()
    weights = resident_bytes(model)
    allowed = weights + int(0.75 * activation_bytes(model, x))
    model(x).square().mean().backward()
    with lowtide.fit(model, x, budget=weights + x.nbytes + allowed) as fit:
        adding = fit.plan
        model.zero_grad()
        for _ in range(2):
            model(x).square().mean().backward()
            model.zero_grad()
            fit.wait()
        status, making = fit.status(), fit.plan

    assert adding.before_bytes == making.before_bytes + weights
    assert making.predicted_overhead < adding.predicted_overhead
    assert status.planned_steps == status.steps == 2


def test_gradients_that_are_freed_between_forward_and_backward_are_there_in_forward():
    """``loss = model(x); optimizer.zero_grad(); loss.backward()``, as Lightning does it."""
    model, x = Layered(), batch_of()
    plain = copy.deepcopy(model)
    weights = resident_bytes(model)
    budget = 2 * weights + x.nbytes + int(0.6 * activation_bytes(model, x))

    def train(model, steps, fit=None):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(3)
        losses, peaks = [], []
        for _ in range(steps):
            there = weights + x.nbytes + bytes_of(p.grad for p in model.parameters() if p.grad is not None)

            def step():
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                losses.append(loss.item())

            peaks.append(there + peak_bytes(step))
            if fit is not None:
                fit.wait()
            optimizer.step()
        return losses, peaks

    with lowtide.fit(model, budget=budget) as fit:
        losses, peaks = train(model, 5, fit)
        status = fit.status()
    expected, plain_peaks = train(plain, 5)

    assert losses == expected and status.in_force
    assert max(peaks[1:]) <= budget < max(plain_peaks)
