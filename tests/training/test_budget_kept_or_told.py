"""A step that takes more than the budget: one line at once, and then what was asked for."""

import dataclasses
import logging

import pytest
import torch
from support.training_steps import mlp
from support.watched_training import Layered, batch_of, resident_bytes, same, train

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.training import excess
from lowtide.training.step_memory import StepMemory
from lowtide.units import format_bytes

pytestmark = pytest.mark.usefixtures("one_thread", "counter_is_there")
MIB = 1 << 20


class Training:
    """From the ``late``th call on ``more`` bytes are there from forward to the next call, which no plan knows."""

    def __init__(self, share=0.6, more=MIB, late=2, **options):
        torch.manual_seed(0)
        self.model, self.batch = mlp(8, 64), torch.randn(512, 64)
        plain = peak_bytes(self.step)
        self.model.zero_grad()
        self.more, self.late, self.num_calls, self.held = more, late, 0, None
        self.budget = int(resident_bytes(self.model) + self.batch.nbytes + share * plain)
        self.fit = lowtide.fit(self.model, budget=self.budget, **options)
        self.model.register_forward_hook(self.hold)

    def hold(self, *_):
        self.held, self.num_calls = None, self.num_calls + 1
        if self.more and self.num_calls >= self.late:
            self.held = torch.empty(self.more, dtype=torch.uint8)

    def step(self):
        self.model(self.batch).square().mean().backward()

    def steps(self, number):
        for _ in range(number):
            self.step()
            self.model.zero_grad()
            self.fit.wait()


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records if "lowtide: a step " in record.getMessage()]


def test_a_step_over_the_budget_is_told_at_once_with_its_bytes_and_once_a_kind(caplog):
    training, told = Training(), []
    with training.fit as fit, caplog.at_level(logging.WARNING, "lowtide"):
        for _ in range(5):
            training.step()
            told.append(len(lines_of(caplog)))
            training.model.zero_grad()
            fit.wait()
        status = fit.status()

    assert told[:2] == [0, 1]
    kinds = [line.split(" took ")[0] for line in lines_of(caplog)]
    assert len(kinds) == len(set(kinds)) and kinds[0] == "lowtide: a step under its plan"
    assert (
        f"{format_bytes(training.budget + status.excess_bytes)} of {format_bytes(training.budget)}, predicted "
        in (lines_of(caplog)[0])
    )
    assert status.over_budget_steps and status.budget_bytes == training.budget


@pytest.mark.parametrize("told_when_made", [False, True])
def test_what_is_foreseen_only_when_the_step_begins_is_told_as_well(told_when_made, caplog, monkeypatch):
    """What an allocator holds by then can make it count more; the plan's own line did not say so."""
    training, begin_step = Training(), StepMemory.begin_step

    def foreseeing(self, step):
        begin_step(self, step)
        if step is not None:
            step.plan = dataclasses.replace(step.plan, predicted_counted_peak_bytes=training.budget + 4 * MIB)
            if told_when_made:
                step.told_peak_bytes = step.plan.measurable_peak_bytes

    monkeypatch.setattr(StepMemory, "begin_step", foreseeing)
    with training.fit as fit, caplog.at_level(logging.WARNING, "lowtide"):
        training.steps(2)
        assert fit.status().over_budget_steps
    lines = [line for line in lines_of(caplog) if "under its plan" in line]

    assert len(lines) == (not told_when_made)
    assert told_when_made or "steps before it left the allocator larger blocks" in lines[0]


def test_without_the_look_at_it_the_same_step_is_silent(caplog, monkeypatch):
    monkeypatch.setattr(excess.Excess, "note", lambda *_, **__: None)
    training = Training()
    with training.fit as fit, caplog.at_level(logging.WARNING, "lowtide"):
        training.steps(4)
        assert fit.status().over_budget_steps
    assert not lines_of(caplog)


def test_raise_ends_the_step_with_whole_gradients_and_numbers():
    training, plain = Training(on_excess="raise"), Training(more=0)
    plain.fit.remove()
    with training.fit as fit:
        training.steps(1)
        with pytest.raises(
            lowtide.BudgetExceededError, match="a step under its plan took .* more than the budget"
        ) as raised:
            training.step()
        plain.step()
        for ours, theirs in zip(training.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        assert raised.value.budget_bytes == training.budget
        assert raised.value.peak_bytes == fit.status().last_peak_bytes > training.budget
        training.more = 0
        training.model.zero_grad()
        training.steps(2)  # it was raised once


def test_an_error_of_backward_is_not_hidden_by_the_one_that_was_asked_for():
    training = Training(on_excess="raise", late=1)
    with training.fit:
        loss = training.model(training.batch).square().mean()
        loss.register_hook(lambda grad: (_ for _ in ()).throw(KeyError("theirs")))
        with pytest.raises(KeyError, match="theirs"):
            loss.backward()


@pytest.mark.parametrize("more", [MIB // 2, 0], ids=["more than the plan knows", "as planned"])
def test_lower_aims_lower_until_the_budget_is_kept_which_stays(more):
    training = Training(more=more, on_excess="lower")
    with training.fit as fit:
        training.steps(8)
        status = fit.status()

    assert status.budget_bytes == training.budget
    assert status.last_peak_bytes <= training.budget + max(excess.UNTOLD_SHARE * training.budget, excess.OWN_BYTES)
    aims = [reason for reason in status.reasons if "steps aim at" in reason]
    assert len(aims) == bool(more)
    if more:
        assert 0 < status.over_budget_steps < 8
        assert fit.plan.budget_bytes < training.budget


def test_lower_stops_where_it_does_not_help():
    training = Training(share=0.2, more=0, on_excess="lower")
    budgets = []
    with training.fit as fit:
        for _ in range(6):
            training.steps(1)
            budgets.append(fit._budget.limit_bytes)
        status = fit.status()

    assert status.budget_bytes == training.budget and status.over_budget_steps == 6
    assert "aiming lower did not help" in " ".join(status.reasons)
    assert len(set(budgets[2:])) == 1


def test_on_status_is_called_once_after_each_step_with_the_last_peak():
    seen = []
    training = Training(more=0, on_status=lambda status: seen.append((status.steps, status.last_peak_bytes)))
    with training.fit as fit:
        for _ in range(4):
            training.step()
            training.model.zero_grad()
            fit.wait()
            assert seen[-1] == (len(seen), fit.status().last_peak_bytes)

    assert [steps for steps, _ in seen] == [1, 2, 3, 4] and None not in [peak for _, peak in seen]


def test_on_status_is_called_though_nobody_holds_the_fit():
    model, seen = mlp(3, 16), []
    lowtide.fit(model, budget="1GiB", on_status=lambda status: seen.append(status.steps))
    for _ in range(2):
        model(torch.randn(4, 16)).sum().backward()

    assert seen == [1, 2]


def test_ten_calls_without_a_step_are_told(caplog):
    model = mlp(3, 16)
    with lowtide.fit(model, budget="1GiB"), caplog.at_level(logging.WARNING, "lowtide"):
        for _ in range(9):
            model(torch.randn(4, 16))
        assert "no step has been seen" not in caplog.text
        model(torch.randn(4, 16))
        assert caplog.text.count("10 calls of the model with gradients, and no backward") == 1


def test_many_backward_passes_of_another_model_are_told_once_and_only_while_it_is_so(caplog):
    """As of two models that are trained in turns, twenty steps each."""
    model, other = mlp(3, 16), mlp(3, 16)

    def told(fit):
        return any("backward passes in a row were of other models" in reason for reason in fit.status().reasons)

    with lowtide.fit(model, budget="1GiB") as fit, caplog.at_level(logging.WARNING, "lowtide"):
        for _ in range(2):
            model(torch.randn(4, 16)).sum().backward()
            assert not told(fit)
            for _ in range(16):
                other(torch.randn(4, 16)).sum().backward()
            assert told(fit)
    assert caplog.text.count("16 backward passes in a row were of other models") == 1


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"on_excess": "lowre"}, ValueError, "on_excess='lowre' is not known. Did you mean 'lower'? Use one of "
         "'warn', 'raise', 'lower'."),
        ({"on_excess": None}, ValueError, "on_excess=None is not known. Use one of 'warn', 'raise', 'lower'."),
        ({"on_status": 3}, TypeError, "on_status=3 is a int. Pass a function of the status."),
    ],
)  # fmt: skip
def test_what_cannot_follow_a_step_is_refused(given, error, told):
    with pytest.raises(error) as raised:
        lowtide.fit(mlp(3, 16), budget="1GiB", **given)
    assert str(raised.value) == told


def test_bits_are_those_of_plain_training_while_the_aim_is_lowered():
    ours, theirs = Layered(), Layered()
    theirs.load_state_dict(ours.state_dict())
    batches = [batch_of()] * 6
    with lowtide.fit(ours, budget=resident_bytes(ours) + MIB // 8, on_excess="lower"):
        assert same(train(theirs, batches), train(ours, batches))
