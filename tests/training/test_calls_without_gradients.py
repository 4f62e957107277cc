"""The model is called without gradients while a step waits for its backward: as a teacher, or for a metric."""

import copy

import pytest
import torch
from support.watched_training import Layered, batch_of, resident_bytes

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.training.running_step import Phase, RunningStep

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 5


def trained(model, *, fit=None):
    """Losses and metrics, weights at the end, and the peak of each step on top of what is there before."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    x, others, told, peaks = batch_of(), batch_of(rows=512), [], []
    for _ in range(STEPS):

        def step():
            loss = model(x).square().mean()
            with torch.no_grad():
                told.append(model(others).abs().mean().item())
            loss.backward()
            told.append(loss.item())

        peaks.append(peak_bytes(step))
        optimizer.step()
        optimizer.zero_grad()
        if fit is not None:
            fit.wait()
    return told, [p.detach().clone() for p in model.parameters()], peaks


def test_what_they_take_is_in_the_plan_and_the_budget():
    model = Layered()
    plain = copy.deepcopy(model)
    there = resident_bytes(model) + batch_of().nbytes + batch_of(rows=512).nbytes
    expected = trained(plain)
    budget = there + int(0.8 * max(expected[2]))

    with lowtide.fit(model, budget=budget) as fit:
        found = trained(model, fit=fit)
        status, (plan,) = fit.status(), fit.plans

    assert found[0] == expected[0] and all(map(torch.equal, found[1], expected[1]))
    assert status.planned_steps == STEPS - 1 and status.calls == STEPS
    assert plan.predicted_peak_bytes <= budget
    assert [there + peak for peak in found[2][1:]] == pytest.approx([plan.predicted_peak_bytes] * (STEPS - 1), rel=1e-3)


def test_of_a_step_whose_backward_does_not_come_only_few_are_part():
    step = RunningStep()
    assert not step.takes_in_call_without_gradients()

    step.phase = Phase.WAITING

    assert [step.takes_in_call_without_gradients() for _ in range(20)] == [True] * 8 + [False] * 12
