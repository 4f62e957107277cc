"""Optimizers that nobody has passed: what they keep counts once they have stepped the model."""

import pytest
import torch
from support.watched_training import Layered, activation_bytes, adamw_bytes, batch_of, bytes_of, resident_bytes
from torch import nn

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.planning.planner_process import PlannerProcess
from lowtide.recording.recorder import Recorder
from lowtide.step import optimizer_steps
from lowtide.step.optimizer_group import OptimizerGroup
from lowtide.step.optimizer_state import checked_optimizer, existing_state_bytes, optimizer_bytes
from lowtide.training.budget import StepBudget
from lowtide.training.plans_by_shape import PlansByShape
from lowtide.training.training_optimizers import TrainingOptimizers

pytestmark = pytest.mark.usefixtures("one_thread")


def steps(model: nn.Module, after, fit: lowtide.Fit | None = None, count: int = 5) -> list[int]:
    """The peak of each step beside what is there before the first one, states that have come since included."""
    peaks, since, batch = [], 0, batch_of()

    def step() -> None:
        model(batch).square().mean().backward()

    for _ in range(count):
        before = since
        peaks.append(before + peak_bytes(step))
        since = after()
        if fit is not None:
            fit.wait()
    return peaks


def with_adamw(model: nn.Module):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def after() -> int:
        optimizer.step()
        optimizer.zero_grad()
        return existing_state_bytes(optimizer)

    return after


def test_state_of_an_optimizer_that_nobody_passed_is_part_of_the_plan(monkeypatch):
    model = Layered()
    plain = max(steps(model, with_adamw(model)))
    budget = resident_bytes(model) + batch_of().nbytes + int(0.75 * plain)

    def fitted() -> tuple[list[int], int]:
        model = Layered()
        with lowtide.fit(model, budget=budget) as fit:
            peaks = steps(model, with_adamw(model), fit)
            assert fit.status().planned_steps >= 2
            return [p + resident_bytes(model) + batch_of().nbytes for p in peaks], fit.graph.resident["optimizer"]

    peaks, state = fitted()
    assert state == adamw_bytes(model.parameters())
    assert max(peaks[2:]) <= budget
    monkeypatch.setattr(TrainingOptimizers, "_note", lambda self, optimizer: None)
    peaks, state = fitted()
    assert state == 0 and max(peaks[2:]) > budget


@pytest.mark.parametrize("kind", ["bytes", "share"])
def test_what_accumulated_steps_ask_for_before_the_first_optimizer_step_is_planned_with_its_state(monkeypatch, kind):
    """Not first a plan that knows nothing of the state, which no step may run under."""
    asked: list[tuple[int, int | str | None]] = []
    submit = PlannerProcess.submit

    def noted(planner, request):
        asked.append((request.graph.resident["optimizer"], request.budget))
        return submit(planner, request)

    monkeypatch.setattr(PlannerProcess, "submit", noted)
    monkeypatch.setattr(PlansByShape, "correct_state", lambda *_: pytest.fail("a plan knew nothing of the state"))
    model, batch = Layered(), batch_of()
    after, state = with_adamw(model), adamw_bytes(model.parameters())
    budget = 2 * resident_bytes(model) + state + batch.nbytes + int(0.5 * activation_bytes(model, batch))
    with lowtide.fit(model, budget=budget if kind == "bytes" else "50%") as fit:

        def accumulated() -> None:
            for _ in range(2):
                model(batch).square().mean().backward()
            after()

        accumulated()
        model(batch)  # what is asked for is planned with the state from here on
        fit.wait()
        accumulated()
        assert fit.status().planned_steps and fit.graph.resident["optimizer"] == state
    (before, first_budget), *later = asked
    assert before == 0 and later
    expected = budget if kind == "bytes" else first_budget + state
    assert later == [(state, expected)] * len(later)


def test_an_optimizer_of_another_model_is_none_of_this_one():
    model, other = Layered(), nn.Linear(4, 4)
    known = TrainingOptimizers(model, None)
    end = known.observe()
    of_other, own = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (other, model))
    of_other.step()
    assert known.all() is None
    own.step()
    end()
    assert known.all() is own


def test_who_observes_goes_with_the_fit():
    before = list(optimizer_steps._observers)
    fit = lowtide.fit(Layered(), budget="1GiB")
    assert len(optimizer_steps._observers) == len(before) + 1
    fit.remove()
    assert optimizer_steps._observers == before


def test_what_fit_was_given_stays_and_others_join_it():
    model = Layered()
    parameters = list(model.parameters())
    given = torch.optim.SGD(parameters[:2], lr=0.1, momentum=0.9)
    other = torch.optim.AdamW(parameters[2:])
    known = TrainingOptimizers(model, given)
    end = known.observe()
    for p in parameters:
        p.grad = torch.ones_like(p)
    assert known.all() is given
    given.step()
    assert known.all() is given
    other.step()
    end()
    both = known.all()
    assert isinstance(both, OptimizerGroup) and both.optimizers == (given, other)
    state = existing_state_bytes(both)
    assert state == bytes_of(parameters[:2]) + adamw_bytes(parameters[2:])


def test_a_name_holds_until_an_optimizer_has_stepped():
    model = Layered()
    known = TrainingOptimizers(model, "adamw")
    end = known.observe()
    assert known.all() == "adamw"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    end()
    assert known.all() is optimizer


@pytest.mark.parametrize("kind", [list, tuple, lambda several: dict(enumerate(several))])
def test_several_are_foreseen_as_one_after_the_other(kind):
    model = Layered()
    parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.ones_like(p)
    several = [torch.optim.AdamW([p]) for p in parameters]
    foreseen, step = optimizer_bytes(kind(several), parameters)
    for optimizer in several:
        optimizer.step()
    assert foreseen == existing_state_bytes(kind(several)) == adamw_bytes(parameters)
    assert step == max(optimizer_bytes(optimizer, [p])[1] for optimizer, p in zip(several, parameters))


@pytest.mark.parametrize("among", ["adamw", None])
def test_a_name_among_several_is_refused(among):
    optimizer = torch.optim.SGD(Layered().parameters(), lr=0.1)
    with pytest.raises(TypeError, match="Pass optimizers, or one name"):
        checked_optimizer([optimizer, among])


def test_state_that_is_made_in_backward_counts_once(monkeypatch):
    """An optimizer that steps in backward makes its state in the first step, which is the one that is recorded."""

    def state_counted() -> tuple[int, int]:
        model = Layered()
        optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

        def step(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in optimizers:
            p.register_post_accumulate_grad_hook(step)
        budget = 4 * resident_bytes(model) + batch_of().nbytes + 700_000
        with lowtide.fit(model, budget=budget) as fit:
            for _ in range(2):
                model(batch_of()).square().mean().backward()
                fit.wait()
            made = [s for op in fit.graph.ops if op.name == "aten.zeros_like.default" for s in op.makes]
            return fit.graph.resident["optimizer"], sum(fit.graph.storages[s].bytes for s in made)

    resident = 2 * resident_bytes(Layered())
    assert state_counted() == (resident, 0)
    monkeypatch.setattr(Recorder, "note_state", lambda self, tensors: None)
    assert state_counted() == (resident, resident)


def test_a_percentage_grows_by_state_that_nobody_foresaw(monkeypatch):
    def budget_and_planned() -> tuple[int, int]:
        model = Layered()
        with lowtide.fit(model, budget="70%") as fit:
            steps(model, with_adamw(model), fit)
            return fit.status().budget_bytes, fit.status().planned_steps

    budget, planned = budget_and_planned()
    monkeypatch.setattr(StepBudget, "follow_state", lambda self: 0)
    without, _ = budget_and_planned()
    assert budget - without == adamw_bytes(Layered().parameters()) and planned == 4


def test_the_first_plan_knows_the_state_of_the_optimizer_that_stepped_meanwhile(monkeypatch):
    def of_first_plan() -> int:
        model = Layered()
        after = with_adamw(model)
        with lowtide.fit(model, budget="1GiB") as fit:
            model(batch_of()).square().mean().backward()
            after()
            fit.wait()
            return fit.graph.resident["optimizer"]

    assert of_first_plan() == adamw_bytes(Layered().parameters())
    monkeypatch.setattr(TrainingOptimizers, "are_unknown", False)
    assert of_first_plan() == 0


@pytest.mark.parametrize("is_foreseen", [True, False])
def test_one_plan_holds_while_the_history_of_lbfgs_grows(is_foreseen, monkeypatch):
    """The plan knows the whole history from the beginning; what is there of it changes nothing."""
    if not is_foreseen:
        monkeypatch.setattr(StepBudget, "lasting_state_bytes", StepBudget.state_bytes)
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh()))), batch_of(1024)
    optimizer, size = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=6), resident_bytes(model)

    def closure():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    held = []
    with lowtide.fit(model, budget=size * 16 + int(9 * batch.nbytes), optimizer=optimizer) as fit:
        for _ in range(5):
            optimizer.step(closure)
            fit.wait()
            held += [fit.graph.resident["optimizer"]] if fit.plans else []
        status = fit.status()

    flat = sum(p.nbytes for p in model.parameters())  # it holds all of them in one tensor
    assert (set(held) == {(2 * 6 + 2) * flat}) == is_foreseen
    assert status.over_budget_steps == 0
