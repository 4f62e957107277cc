"""What each step takes is counted, under a plan too, on a CPU as by whoever counts from outside."""

import pytest
import torch
from support.training_steps import mlp
from support.watched_training import bytes_of, resident_bytes

import lowtide
from lowtide.device import allocation_counter
from lowtide.measurement.allocator import peak_bytes
from lowtide.training.plans_by_shape import PlansByShape
from lowtide.training.step_memory import StepMemory

pytestmark = pytest.mark.usefixtures("one_thread", "counter_is_there")


class Training:
    def __init__(self, share=0.6, optimizer=None, **options):
        torch.manual_seed(0)
        self.model, self.batch = mlp(8, 64), torch.randn(512, 64)
        self.optimizer = optimizer and optimizer(self.model.parameters())
        plain = peak_bytes(self.step)
        self.model.zero_grad()
        self.there = resident_bytes(self.model) + self.batch.nbytes
        self.fit = lowtide.fit(self.model, budget=int(self.there + share * plain), optimizer=self.optimizer, **options)

    def step(self):
        self.model(self.batch).square().mean().backward()


def test_the_peak_of_each_step_is_told():
    training = Training()
    with training.fit as fit:
        for _ in range(4):
            start = resident_bytes(training.model) + training.batch.nbytes
            taken = start + peak_bytes(training.step)
            assert fit.status().last_peak_bytes == taken
            training.model.zero_grad()
            fit.wait()
        status = fit.status()

    assert status.planned_steps == 3
    assert status.last_peak_bytes == fit.plan.predicted_peak_bytes
    assert status.highest_peak_bytes == status.observed_peak_bytes <= status.budget_bytes
    assert (status.over_budget_steps, status.excess_bytes, status.plan_left_steps) == (0, 0, 0)
    assert "in steps without a plan" not in str(status)


def test_optimizer_state_and_gradients_that_are_there_count():
    training = Training(share=1.5, optimizer=torch.optim.AdamW)
    with training.fit as fit:
        for _ in range(3):
            start = resident_bytes(training.model) + training.batch.nbytes
            states = [t for s in training.optimizer.state.values() for t in s.values() if t.dim() or not t.is_cpu]
            start += bytes_of(states) + bytes_of(p.grad for p in training.model.parameters() if p.grad is not None)
            taken = start + peak_bytes(training.step)
            training.optimizer.step()
            fit.wait()
        status = fit.status()

    assert status.planned_steps == 2 and states
    assert status.last_peak_bytes == taken


@pytest.mark.parametrize("as_what", [lambda output: output, lambda output: {"logits": output}, torch.Tensor.t])
def test_what_the_loop_holds_of_the_last_output_was_there_before(as_what):
    """As in ``outputs = model(**batch)``: the last one goes when the next one has been made."""
    training = Training(share=1.5)
    training.model.register_forward_hook(lambda module, given, output: as_what(output))
    output = None

    def step():
        nonlocal output
        output = training.model(training.batch)
        next(iter(output.values() if isinstance(output, dict) else [output])).square().mean().backward()

    with training.fit as fit:
        for _ in range(4):
            held = 0 if output is None else 512 * 64 * 4
            taken = resident_bytes(training.model) + training.batch.nbytes + held + peak_bytes(step)
            assert fit.status().last_peak_bytes == taken
            training.model.zero_grad()
            fit.wait()
        assert fit.status().planned_steps == 3
        assert fit.status().last_peak_bytes == fit.plan.predicted_peak_bytes


def test_steps_without_a_plan_make_room_for_what_the_loop_holds(monkeypatch):
    monkeypatch.setattr(PlansByShape, "plan_for", lambda self, shape: None)
    training = Training(share=0.5)
    outputs = []
    with training.fit as fit:
        for _ in range(4):
            outputs.append(training.model(training.batch))
            outputs[-1].square().mean().backward()
            training.model.zero_grad()
            del outputs[:-1]
        status = fit.status()

    assert status.planned_steps == 0 and status.excess_bytes < 64  # a number or two
    assert status.highest_peak_bytes > status.budget_bytes - 512 * 64 * 4


def test_a_batch_that_a_model_gives_back_counts_once():
    training = Training(share=1.5)
    training.model.register_forward_hook(lambda module, given, output: (output, given[0]))
    with training.fit as fit:
        for _ in range(3):
            output = training.model(training.batch)
            output[0].square().mean().backward()
            del output
            training.model.zero_grad()
            fit.wait()
        assert fit.status().last_peak_bytes == fit.plan.predicted_peak_bytes


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


class Growing(torch.nn.Module):
    """A table of rows, each of which takes part in each step."""

    def __init__(self, rows, width=256):
        super().__init__()
        self.rows = torch.nn.Parameter(torch.randn(rows, width))

    def grow(self, times):
        self.rows.grad = None
        self.rows.data = self.rows.detach().repeat(times, 1)

    def forward(self, x):
        for _ in range(4):
            x = torch.tanh(self.rows * x)
        return x


def whole_peak(model, x):
    model.zero_grad()
    start = resident_bytes(model) + x.nbytes
    return start + peak_bytes(lambda: model(x).square().mean().backward())


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_parameters_that_grow_under_a_plan_that_keeps_everything(is_looked_at, monkeypatch):
    if not is_looked_at:
        monkeypatch.setattr(PlansByShape, "start_afresh", lambda self, before, now: None)
        monkeypatch.setattr(StepMemory, "outgrown_bytes", lambda *_: 0)
        monkeypatch.setattr(PlansByShape, "note_peak", lambda self, planned, peak: False)
    model, x = Growing(512), torch.randn(256)
    budget = int(1.1 * whole_peak(model, x))
    with lowtide.fit(model, budget=budget) as fit:
        for _ in range(3):
            whole_peak(model, x)
            fit.wait()
        assert fit.status().in_force and fit.plan.counts["recompute"] == 0
        model.grow(2)
        plain = Growing(1024)
        plain_peak = whole_peak(plain, x)
        peaks = []
        for _ in range(4):
            peaks.append(whole_peak(model, x))
            fit.wait()
        status = fit.status()

    assert plain_peak > 1.5 * budget
    if is_looked_at:
        assert max(peaks) < 0.9 * plain_peak and status.in_force
        assert any("the model's parameters took 512.00 KiB, and take 1.00 MiB" in reason for reason in status.reasons)
    else:
        assert max(peaks) >= plain_peak and any("a step under its plan took up to" in r for r in status.reasons)
