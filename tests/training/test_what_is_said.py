"""What a fit says is what was counted, and it says it in a few lines."""

import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from support.watched_training import Layered, activation_bytes, batch_of, reasons_of, resident_bytes, same, train
from torch import nn
from torch.autograd.graph import save_on_cpu

import lowtide
from lowtide.errors import BudgetInfeasibleError
from lowtide.training.budget import StepBudget
from lowtide.training.notices import Notices
from lowtide.training.plans_by_shape import PlansByShape
from lowtide.training.status import Counters
from lowtide.training.step_memory import StepMemory
from lowtide.units import format_bytes

pytestmark = pytest.mark.usefixtures("one_thread")
MIB = 1 << 20


# -- numbers --------------------------------------------------------------------------------------------------


@pytest.fixture
def told():
    """What is said of a step without a plan that may take 4 MiB, and whose tape counted this."""
    model = nn.Linear(4, 4)
    budget = StepBudget(model, 4 * MIB)

    def said(live_bytes, asked_bytes, workspace, ran_opaque=""):
        reasons = Notices()
        releaser = SimpleNamespace(budget_bytes=4 * MIB, over_bytes=asked_bytes - 4 * MIB, lowered_bytes=0)
        live = SimpleNamespace(peak=live_bytes)
        watch = SimpleNamespace(releaser=releaser, live=live, peak_workspace=workspace, ran_opaque=ran_opaque)
        memory = StepMemory(budget, None, Counters(), reasons)
        memory.note_peak(watch)
        memory.end_step(None, ran_plan=False)
        return " ".join(reasons.lines)

    return said


def test_room_that_was_only_asked_for_is_not_said_to_have_been_taken(told):
    assert told(live_bytes=3 * MIB, asked_bytes=600 * MIB, workspace=(0, "")) == ""
    assert "took up to 1.00 MiB more than the budget" in told(5 * MIB, 600 * MIB, (0, ""))


def test_compiled_code_of_which_nothing_is_seen_is_the_reason(told):
    assert "what compiled code stores (layers.2) is not seen, and saved" in told(6 * MIB, 6 * MIB, (0, ""), "layers.2")


def test_an_op_is_the_reason_only_where_its_workspace_is_as_large(told):
    assert "aten.mul" not in told(8 * MIB, 8 * MIB, (12, "aten.mul in the model"))
    assert "aten.mm in the model takes 3.00 MiB beside" in told(8 * MIB, 8 * MIB, (3 * MIB, "aten.mm in the model"))


def refusing(least_bytes):
    def adopted(plans, asked, plan):
        if asked.request.budget < least_bytes:
            raise BudgetInfeasibleError("none", budget_bytes=asked.request.budget, least_bytes=least_bytes)
        return adopted_before(plans, asked, plan)

    adopted_before = PlansByShape._adopted
    return adopted


@pytest.fixture
def model():
    return Layered()


@pytest.fixture
def budget(model):
    return resident_bytes(model) + int(0.7 * activation_bytes(model, batch_of()))


def test_no_plan_takes_the_place_of_steps_without_one_that_fit(model, budget, monkeypatch):
    monkeypatch.setattr(PlansByShape, "_adopted", refusing(2 * budget))
    with lowtide.fit(model, budget=budget) as fit:
        for _ in range(4):
            train(model, [batch_of()])
            fit.wait()
        status = fit.status()

    assert status.observed_peak_bytes <= budget and status.planned_steps == 0
    assert "no plan fits" not in " ".join(status.reasons)
    took = f"the leanest plan takes {format_bytes(2 * budget)}, and a step without one took "
    assert any(took in reason for reason in status.reasons)


def test_it_does_where_those_took_more_and_one_line_tells_of_all_sizes(model, budget, monkeypatch):
    monkeypatch.setattr(PlansByShape, "_adopted", refusing(2 * budget))
    with lowtide.fit(model, budget=budget) as fit:
        plans = fit._lifecycle.plans_by_shape
        for rows in (128, 200, 300):
            train(model, [batch_of(rows)])
            for shape in plans.seen:
                plans.unplanned.note(shape, 3 * budget, 0, None)
            fit.wait()
        status = fit.status()

    lines = [reason for reason in status.reasons if f"no plan fits {format_bytes(budget)}" in reason]
    assert len(lines) == 1 and "running at the least there is, " in lines[0]
    assert "input shapes" in lines[0]


# -- few lines ------------------------------------------------------------------------------------------------


def test_batches_of_thirty_sizes_print_a_few_lines(model, budget, caplog):
    with lowtide.fit(model, budget=budget) as fit, caplog.at_level(logging.WARNING, "lowtide"):
        for rows in range(40, 160, 4):
            train(model, [batch_of(rows)])
            fit.wait()
        assert fit.status().shapes == 30

    assert 1 <= len(caplog.records) <= 6, caplog.messages


# -- effects that are named -----------------------------------------------------------------------------------


@pytest.mark.parametrize("planned_first", [False, True], ids=["watched", "rehearsed"])
def test_hooks_around_the_model_are_named(model, planned_first):
    def call(model, x):
        with save_on_cpu():
            return model(x)

    expected = train(copy_of(model), [batch_of()] * 3, call)
    with lowtide.fit(model, *([batch_of()] if planned_first else []), budget="70%") as fit:
        found = train(model, [batch_of()] * 3, call)
        reasons = reasons_of(fit)

    assert same(found, expected)
    assert "torch.autograd.graph.save_on_cpu is around the model" in reasons
    assert "offload= moves tensors" in reasons


def copy_of(model):
    copied = Layered()
    copied.load_state_dict(model.state_dict())
    return copied


def test_lowtides_own_hooks_are_not(model, budget):
    with lowtide.fit(model, budget=budget) as fit:
        for _ in range(3):
            train(model, [batch_of()])
            fit.wait()
        assert "saved-tensor hooks" not in reasons_of(fit)


class Inner(nn.Module):
    """Its weight is a result of an inner training step, as in MAML."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.slow = nn.Parameter(torch.randn(64, 64) / 8)
        del self.linear._parameters["weight"]
        self.step()

    def step(self):
        self.linear._parameters["weight"] = self.slow * 1.5

    def forward(self, x):
        return self.last(self.linear(x).tanh())


def test_a_parameter_that_is_a_result_raises_no_warning_and_is_refused_for_a_rehearsal():
    model, x = Inner(), batch_of()
    with warnings.catch_warnings(), lowtide.fit(model, budget="90%") as fit:
        warnings.simplefilter("error")
        for _ in range(3):
            model.step()
            model(x).square().mean().backward()
            fit.wait()
        assert fit.status().steps == 3
    with pytest.raises(lowtide.UnsupportedModelError, match="parameter linear.weight is a result of ops"):
        lowtide.fit(model, x, budget="90%")
