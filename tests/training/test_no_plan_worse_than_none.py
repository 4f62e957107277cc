"""A plan is in force only while steps under it are better than steps without one."""

import pytest
import torch
from support.training_steps import mlp
from support.watched_training import resident_bytes

import lowtide
from lowtide.errors import BudgetInfeasibleError
from lowtide.measurement.allocator import peak_bytes
from lowtide.shapes.call_shapes import CallShape
from lowtide.training import unplanned_steps
from lowtide.training.notices import Notices
from lowtide.training.plans_by_shape import PlansByShape
from lowtide.training.told_plans import ToldPlans
from lowtide.units import format_bytes

pytestmark = pytest.mark.usefixtures("one_thread")
adopted = PlansByShape._adopted


class Training:
    def __init__(self, share=0.7):
        torch.manual_seed(0)
        self.model, self.batch = mlp(8, 64), torch.randn(512, 64)
        plain = peak_bytes(self.step)
        self.model.zero_grad()
        self.budget = int(resident_bytes(self.model) + self.batch.nbytes + share * plain)
        self.fit = lowtide.fit(self.model, budget=self.budget)
        self.plans = self.fit._lifecycle.plans_by_shape

    def step(self):
        self.model(self.batch).square().mean().backward()

    def steps(self, count):
        for _ in range(count):
            self.model.zero_grad()
            self.step()
            self.fit.wait()

    def first_step(self, peak_bytes, step_ms=None):
        """A step without a plan that took so much, and was watched."""
        self.model.zero_grad()
        self.step()
        (shape,) = self.plans.seen
        for _ in range(2):  # one may be slow by chance
            self.plans.unplanned.note(shape, peak_bytes, self.fit._lifecycle.memory.start_bytes, step_ms)
        self.fit.wait()


@pytest.mark.parametrize("share, is_in_force", [(1.501, False), (1.499, True)])
def test_the_least_plan_is_put_in_force_unless_steps_without_one_took_less(share, is_in_force, monkeypatch):
    training = Training()
    least = int(share * training.budget)

    def infeasible(plans, asked, plan):
        if asked.request.budget < least:
            error = BudgetInfeasibleError("it is so", budget_bytes=asked.request.budget, least_bytes=least)
            raise error
        return adopted(plans, asked, plan)

    monkeypatch.setattr(PlansByShape, "_adopted", infeasible)
    with training.fit as fit:
        training.first_step(int(1.5 * training.budget))
        training.steps(1)
        status = fit.status()

    assert status.in_force == is_in_force
    took = f"the leanest plan takes {format_bytes(least)}, and a step without one took "
    assert any(took in reason for reason in status.reasons) != is_in_force


@pytest.mark.parametrize("is_compared", [True, False])
def test_a_plan_that_is_slower_than_steps_without_one_is_not_put_in_force(is_compared, monkeypatch):
    if not is_compared:
        monkeypatch.setattr(unplanned_steps, "_CLEARLY_SLOWER", float("inf"))
    training = Training()
    with training.fit as fit:
        training.first_step(training.budget - 1, step_ms=1e-3)
        training.steps(2)
        status = fit.status()

    assert status.in_force != is_compared
    told = [reason for reason in status.reasons if "a step without one took 0.0 ms and " in reason]
    assert bool(told) == is_compared
    assert all("a step under the plan is predicted to take" in reason for reason in told)


@pytest.mark.usefixtures("counter_is_there")
@pytest.mark.parametrize("is_measured", [True, False])
def test_a_plan_whose_steps_take_more_than_it_says_goes(is_measured, monkeypatch):
    if not is_measured:
        monkeypatch.setattr(PlansByShape, "note_peak", lambda self, planned, peak: False)
    training = Training()
    held = []

    def hold(*_):
        lifecycle = training.fit._lifecycle
        if lifecycle.step.runs_plan:  # no watch sees it
            held.append(torch.empty(1 << 21, dtype=torch.uint8))

    training.model.register_forward_hook(hold)
    with training.fit as fit:
        training.steps(40)
        status = fit.status()

    told = [reason for reason in status.reasons if "a step under its plan took up to" in reason]
    assert len(told) == 1 and f"of {format_bytes(training.budget)}, predicted " in told[0]
    if is_measured:
        assert not status.in_force and 8 <= status.planned_steps + status.plan_left_steps == len(held) <= 12
        assert status.over_budget_steps >= 1 and status.excess_bytes > 1 << 20
        assert any("or of other sizes (skipped layers" in reason for reason in status.reasons)
    else:
        assert status.in_force and status.planned_steps == 39


@pytest.mark.parametrize("above_budget", [True, False])
def test_a_plan_above_the_budget_has_to_be_faster_than_steps_without_one(above_budget):
    training = Training()
    with training.fit:
        training.first_step(int(1.2 * training.budget), step_ms=10.0)
        (shape,) = training.plans.seen
        peak = int((1.1 if above_budget else 0.9) * training.budget)
        assert bool(training.plans._why_worse(shape, peak, 0, 15.0)) == above_budget
        assert not training.plans._why_worse(shape, peak, 0, 9.0)


@pytest.mark.parametrize("is_named", [True, False])
def test_the_least_of_one_kind_of_step_is_not_told_as_that_of_another(is_named, monkeypatch):
    """Steps that make their gradients run at the least there is; those that add to them are better without a plan."""
    if not is_named:
        monkeypatch.setattr(ToldPlans, "which", lambda self, shapes: "")
    training = Training()
    least = {adding: int(share * training.budget) for adding, share in ((False, 1.5), (True, 1.3))}

    def infeasible(plans, asked, plan):
        kind = asked.shapes[0].has_gradients
        if asked.request.budget < least[kind]:
            raise BudgetInfeasibleError("so", budget_bytes=asked.request.budget, least_bytes=least[kind])
        return adopted(plans, asked, plan)

    def took(shape, share):
        start_bytes = training.fit._lifecycle.memory.start_bytes
        training.plans.unplanned.note(shape, int(share * training.budget), start_bytes, None)

    monkeypatch.setattr(PlansByShape, "_adopted", infeasible)
    monkeypatch.setattr(PlansByShape, "_from_other_micro_batch", lambda self, shape, found: found)
    with training.fit as fit:
        for _ in range(2):
            training.step()
            for shape in training.plans.seen:
                took(shape, 1.2 if shape.has_gradients else 1.6)
            fit.wait()
        lines = fit.status().reasons

    (at_least,) = [line for line in lines if "running at the least there is" in line]
    (without,) = [line for line in lines if "the leanest plan takes" in line]
    assert format_bytes(least[False]) in at_least and format_bytes(least[True]) in without
    assert ("for steps that make their gradients" in at_least) == is_named
    assert ("for steps that add to gradients" in without) == is_named


@pytest.mark.parametrize("is_taken_back", [True, False])
def test_that_no_plan_fits_is_taken_back_where_steps_without_one_turn_out_to_take_less(is_taken_back, monkeypatch):
    training = Training()
    least = int(1.5 * training.budget)

    def infeasible(plans, asked, plan):
        if asked.request.budget < least:
            raise BudgetInfeasibleError("so", budget_bytes=asked.request.budget, least_bytes=least)
        for shape in plans.seen:  # a step that ran while the least was being planned
            plans.unplanned.by_shape[shape].peak_bytes = int(1.2 * training.budget)
        monkeypatch.setattr(plan.__class__, "budgeted_peak_bytes", least)
        return adopted(plans, asked, plan)

    monkeypatch.setattr(PlansByShape, "_adopted", infeasible)
    if not is_taken_back:
        monkeypatch.setattr(Notices, "withdraw", lambda self, reason: None)
    with training.fit as fit:
        training.first_step(int(1.6 * training.budget))
        lines = fit.status().reasons

    assert any("the leanest plan takes" in line for line in lines)
    assert any("no plan fits" in line for line in lines) != is_taken_back


def test_that_no_plan_fits_is_told_of_the_present_budget(monkeypatch):
    training = Training()
    with training.fit as fit:
        training.steps(2)
        (shape,) = training.plans.seen
        training.plans.least_bytes[shape] = training.budget + 10
        training.plans.change_budget(training.budget)
        assert any("no plan fits" in line for line in fit.status().reasons)
        training.plans.change_budget(training.budget + 10)
        assert not any("no plan fits" in line for line in fit.status().reasons)


@pytest.mark.parametrize("knows_start", [True, False])
def test_a_step_before_the_optimizers_state_is_no_measure_of_later_ones(knows_start, monkeypatch):
    """Below what the state leaves nothing fits: the plan at the least there is beats steps at the same peak."""
    if not knows_start:
        monkeypatch.setattr(unplanned_steps.Unplanned, "peak_from", lambda self, start_bytes: self.peak_bytes)
    torch.manual_seed(0)
    model, batch = mlp(8, 512), torch.randn(64, 512)
    optimizer = torch.optim.Adam(model.parameters())
    with lowtide.fit(model, budget=int(2.3 * resident_bytes(model)), optimizer=None) as fit:
        for _ in range(6):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            fit.wait()
        status = fit.status()

    worse = [reason for reason in status.reasons if "the leanest plan takes" in reason]
    assert bool(worse) != knows_start, status.reasons
    if knows_start:
        assert any("running at the least there is" in reason for reason in status.reasons)


def test_a_shape_that_has_got_a_plan_since_is_none_of_those_that_are_told_of():
    notices = Notices()
    told = ToldPlans(8, notices)
    first, second, third = (CallShape("x", (rows,)) for rows in (8, 16, 32))
    told.seen = {first, second, third}
    told.say_refused(first, "they run online: 1 of 9 ops", {first})
    told.say_refused(second, "they run online: 2 of 9 ops", {first, second})
    assert notices.lines == ["no plan for 2 input shapes, they run online: 2 of 9 ops"]
    told.say_refused(third, "they run online: 3 of 9 ops", {second, third})  # the first has a plan now
    assert notices.lines == ["no plan for 2 input shapes, they run online: 3 of 9 ops"]
