"""What steps take is counted by the device's allocator, planned ones too, and its peak statistic stays the user's."""

import gc

import pytest
import torch
from support.training_steps import mlp

import lowtide
from lowtide.device import allocation_counter, memory
from lowtide.training.plans_by_shape import PlansByShape
from lowtide.training.step_memory import StepMemory
from lowtide.units import format_bytes

MIB = 2**20
NO_HOST = lowtide.Offload(host_budget=None)


def model_and_batch(depth=6, width=64, rows=4096):
    torch.manual_seed(0)
    model = mlp(depth, width).to("standin")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    gc.collect()
    return model, torch.randn(rows, width, device="standin")


def step(model, batch):
    model(batch).square().mean().backward()


def counted(model, batch):
    """The step's peak, by what a user sees."""
    torch.accelerator.reset_peak_memory_stats()
    step(model, batch)
    return torch.accelerator.max_memory_allocated()


def fitted(model, batch, share=0.6):
    before = torch.accelerator.memory_allocated()
    budget = before + int(share * (counted(model, batch) - before))
    return lowtide.fit(model, budget=budget, offload=NO_HOST)


def test_the_peak_of_a_planned_step_is_told(device):
    model, batch = model_and_batch()
    with fitted(model, batch) as fit:
        step(model, batch)
        fit.wait()
        peaks = [counted(model, batch) for _ in range(3)]
        status, plan = fit.status(), fit.plan

    assert status.planned_steps == 3 and len(set(peaks)) == 1
    assert status.last_peak_bytes == peaks[-1] <= plan.measurable_peak_bytes
    assert peaks[-1] <= status.highest_peak_bytes == status.observed_peak_bytes <= status.budget_bytes


def test_the_peak_of_a_planned_step_is_told_below_one_of_the_users_which_stays(device):
    model, batch = model_and_batch()
    with fitted(model, batch) as fit:
        step(model, batch)
        fit.wait()
        torch.empty(64 * MIB, dtype=torch.uint8, device="standin")
        before = torch.accelerator.max_memory_allocated()
        for _ in range(3):
            step(model, batch)
            assert torch.accelerator.max_memory_allocated() == before
        status = fit.status()
        peak = counted(model, batch)

    assert status.planned_steps == 3 and status.highest_peak_bytes < before
    assert status.last_peak_bytes == peak
    assert status.reasons == ()


def test_a_planned_step_that_takes_more_than_its_budget_is_told(device):
    model, batch = model_and_batch()
    taken = []
    more = 0
    model.register_forward_hook(lambda *_: taken.append(torch.empty(more, dtype=torch.uint8, device="standin")))
    with fitted(model, batch) as fit:
        step(model, batch)
        fit.wait()
        step(model, batch)
        before = fit.status()
        more = 80 * MIB
        peak = counted(model, batch)
        status = fit.status()

    assert before.planned_steps == 1 and before.reasons == () and status.planned_steps == 2
    assert status.last_peak_bytes == status.highest_peak_bytes == peak > status.budget_bytes
    assert "a step under its plan took up to" in status.reasons[-1]


@pytest.mark.parametrize("counts", [True, False])
def test_a_later_planned_step_is_counted_below_a_peak_of_the_users(device, monkeypatch, counts):
    if not counts:
        monkeypatch.setattr(allocation_counter, "count", lambda *_: None)
    model, batch = model_and_batch()
    taken = []
    model.register_forward_hook(lambda *_: taken.append(torch.empty(more, dtype=torch.uint8, device="standin")))
    more = 0
    with fitted(model, batch) as fit:
        step(model, batch)
        fit.wait()
        step(model, batch)
        first = fit.status().last_peak_bytes
        torch.empty(64 * MIB, dtype=torch.uint8, device="standin")
        before = torch.accelerator.max_memory_allocated()
        more = 8 * MIB
        step(model, batch)
        status = fit.status()

    assert status.planned_steps == 2 and torch.accelerator.max_memory_allocated() == before
    assert (status.last_peak_bytes > first) == counts  # the statistic tells of what it rises to, and of nothing else


@pytest.mark.parametrize("budget_share", [0.5, 2.0])
def test_the_users_peak_is_exact_after_a_watched_step(device, budget_share):
    model, batch = model_and_batch()
    with fitted(model, batch, share=budget_share) as fit:
        torch.accelerator.reset_peak_memory_stats()
        step(model, batch)
        status = fit.status()

    assert status.steps == 1 and status.planned_steps == 0
    assert torch.accelerator.max_memory_allocated() == status.last_peak_bytes == status.highest_peak_bytes


def test_a_peak_that_cannot_be_given_back_is_told_until_it_is(device):
    model, batch = model_and_batch()
    with fitted(model, batch) as fit:
        held = torch.empty(64 * MIB, dtype=torch.uint8, device="standin")
        del held
        peak = torch.accelerator.max_memory_allocated()
        torch.accelerator.empty_cache()
        step(model, batch)
        low, told = torch.accelerator.max_memory_allocated(), fit.status().reasons
        held = torch.empty(64 * MIB, dtype=torch.uint8, device="standin")
        del held  # the allocator holds enough again
        fit.wait()
        step(model, batch)

        assert low < peak == torch.accelerator.max_memory_allocated()
        assert any("the device's peak statistic (max_memory_allocated) is lower than" in reason for reason in told)
        assert fit.status().reasons == ()


def test_a_peak_that_the_user_has_reset_meanwhile_is_not_given_back(device):
    model, batch = model_and_batch()
    with fitted(model, batch) as fit:
        torch.empty(64 * MIB, dtype=torch.uint8, device="standin")
        torch.accelerator.empty_cache()
        step(model, batch)
        assert memory.peak_not_given_back("standin") is not None
        torch.accelerator.reset_peak_memory_stats()
        torch.empty(80 * MIB, dtype=torch.uint8, device="standin")
        torch.accelerator.reset_peak_memory_stats()
        step(model, batch)

        assert torch.accelerator.max_memory_allocated() <= fit.status().highest_peak_bytes
        assert memory.peak_not_given_back("standin") is None


class StateNobodyTold:
    """A training that keeps something after its first step that no optimizer has: averages of weights, or gradients."""

    def __init__(self):
        self.model, self.batch = model_and_batch(depth=6, width=256, rows=2048)
        before = torch.accelerator.memory_allocated()
        self.state_bytes = sum(2 * p.nbytes for p in self.model.parameters())
        activations = counted(self.model, self.batch) - before
        self.budget = before + self.state_bytes + activations // 2
        self.state = []

    def steps(self, fit, count):
        for _ in range(count):
            peak = counted(self.model, self.batch)
            self.state = self.state or [torch.zeros_like(p) for p in self.model.parameters() for _ in range(2)]
            self.model.zero_grad(set_to_none=False)
            fit.wait()
            yield peak


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_a_plan_that_no_longer_fits_beside_what_is_there_is_dropped_and_made_anew(device, monkeypatch, is_looked_at):
    if not is_looked_at:
        monkeypatch.setattr(StepMemory, "outgrown_bytes", lambda *_: 0)
        monkeypatch.setattr(PlansByShape, "note_peak", lambda self, planned, peak: False)  # it would tell afterwards
    training = StateNobodyTold()
    with lowtide.fit(training.model, budget=training.budget, offload=NO_HOST) as fit:
        (first, *peaks) = training.steps(fit, 5)
        status = fit.status()

    assert first <= training.budget
    if is_looked_at:
        assert max(peaks) <= training.budget
        assert status.in_force and status.planned_steps == 3  # the second is online: its plan was dropped
        assert [
            reason for reason in status.reasons if "more are on the device before a step than its plan knows" in reason
        ]
    else:
        assert max(peaks) > training.budget and status.planned_steps == 4
        assert "a step under its plan took up to" in status.reasons[-1]


@pytest.mark.parametrize("puts_aside", [True, False])
def test_a_plan_is_back_when_what_was_there_for_a_moment_has_gone(device, monkeypatch, puts_aside):
    """And the next time, the plan that was made beside it is there at once."""
    if not puts_aside:
        monkeypatch.setattr(PlansByShape, "best_that_fits", lambda _, __, planned, ___: planned)
    model, batch = model_and_batch(depth=6, width=256, rows=2048)
    before = torch.accelerator.memory_allocated()
    activations = counted(model, batch) - before
    budget = before + int(0.9 * activations)
    others, plans = [], []
    with lowtide.fit(model, budget=budget, offload=NO_HOST) as fit:
        for is_there in (False, False, True, True, False, True, False):
            others[:] = [torch.empty(activations // 4, dtype=torch.uint8, device="standin")] if is_there else []
            assert counted(model, batch) <= budget
            plans.append(fit.plan if fit.status().in_force else None)
            model.zero_grad(set_to_none=False)
            fit.wait()
        status = fit.status()

    assert [plan is None for plan in plans[:4]] == [True, False, True, False]
    roomy, tight = plans[1], plans[3]
    assert tight.predicted_overhead > roomy.predicted_overhead
    if puts_aside:
        assert plans[4:] == [roomy, tight, roomy] and status.planned_steps == 5
        assert any("of two plans, a step runs under the one that fits" in reason for reason in status.reasons)
    else:
        assert plans[4:] == [tight, tight, tight]


def test_the_least_there_is_stays_and_knows_what_it_takes_beside_what_came(device):
    training = StateNobodyTold()
    budget = torch.accelerator.memory_allocated() + sum(p.nbytes for p in training.model.parameters())
    with lowtide.fit(training.model, budget=budget, offload=NO_HOST) as fit:
        *_, last = training.steps(fit, 4)
        plan, status = fit.plan, fit.status()

    assert status.in_force and status.planned_steps == 3
    assert plan.predicted_peak_bytes == last > budget + training.state_bytes
    least = f"running at the least there is, {format_bytes(last)}"
    assert [reason for reason in status.reasons if "no plan fits" in reason and reason.endswith(least)]
    assert not [reason for reason in status.reasons if "does not know" in reason]


def test_a_plan_is_kept_where_only_gradients_come_and_go(device):
    model, batch = model_and_batch()
    with fitted(model, batch) as fit:
        for number in range(4):
            step(model, batch)
            model.zero_grad(set_to_none=bool(number % 2))
            fit.wait()
        status = fit.status()

    assert status.planned_steps == 3 and status.reasons == ()
