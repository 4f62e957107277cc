"""What each step takes is counted, under a plan too, on a CPU as by whoever counts from outside."""

import pytest
import torch
from support.training_steps import mlp
from support.watched_training import resident_bytes

import lowtide
from lowtide.device import allocation_counter
from lowtide.measurement.allocator import peak_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _counter():
    if not allocation_counter.is_there():
        pytest.skip(allocation_counter.why_missing())


class Training:
    def __init__(self, share=0.6, optimizer=None, **options):
        torch.manual_seed(0)
        self.model, self.batch = mlp(8, 64), torch.randn(512, 64)
        self.optimizer = optimizer and optimizer(self.model.parameters())
        plain = peak_bytes(self.step)
        self.model.zero_grad()
        self.there = resident_bytes(self.model) + self.batch.nbytes
        self.fit = lowtide.fit(
            self.model, budget=int(self.there + share * plain), optimizer=self.optimizer, **options
        )

    def step(self):
        self.model(self.batch).square().mean().backward()


def test_the_peak_of_each_step_is_told():
    training = Training()
    with training.fit as fit:
        for number in range(4):
            start = resident_bytes(training.model) + training.batch.nbytes
            taken = start + peak_bytes(training.step)
            assert fit.status().last_peak_bytes == taken
            training.model.zero_grad()
            fit.wait()
        status = fit.status()

    assert number == 3 and status.planned_steps == 3
    assert status.last_peak_bytes == fit.plan.predicted_peak_bytes
    assert status.highest_peak_bytes == status.observed_peak_bytes <= status.budget_bytes
    assert (status.over_budget_steps, status.excess_bytes, status.plan_left_steps) == (0, 0, 0)
    assert "in steps without a plan" not in str(status)


def test_optimizer_state_and_gradients_that_are_there_count():
    training = Training(share=1.5, optimizer=torch.optim.AdamW)
    with training.fit as fit:
        for _ in range(3):
            start = resident_bytes(training.model) + training.batch.nbytes
            state = sum(t.nbytes for s in training.optimizer.state.values() for t in s.values() if t.dim())
            start += state + sum(p.grad.nbytes for p in training.model.parameters() if p.grad is not None)
            taken = start + peak_bytes(training.step)
            training.optimizer.step()
            fit.wait()
        status = fit.status()

    assert status.planned_steps == 2 and state
    assert status.last_peak_bytes == taken


def test_a_step_under_a_profiler_is_not_counted_and_that_is_told():
    training = Training()
    with training.fit as fit:
        training.step()
        fit.wait()
        training.step()
        loss = training.model(training.batch).square().mean()
        allocation_counter.step_aside()  # as when a profiler starts between forward and backward
        loss.backward()
        lost = fit.status()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(allocation_counter, "count", lambda *_: None)  # as when one is active
            training.step()
        never = fit.status()
        training.step()
        again = fit.status()

    for status in (lost, never):
        assert status.in_force and status.last_peak_bytes is None and status.highest_peak_bytes is None
        assert any("not counted while a profiler is active" in reason for reason in status.reasons)
    assert again.last_peak_bytes is not None
