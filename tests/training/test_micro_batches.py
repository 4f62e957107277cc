"""Gradients add up over micro-batches: the first one makes them, later ones find them there, and each has its plan."""

import copy

import pytest
import torch
from support.training_steps import mlp
from support.watched_training import Layered, activation_bytes, batch_of, bytes_of, peaks_by_the_tape, resident_bytes

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.step.gradients_there import GradientsThere
from lowtide.tape import tape
from lowtide.training import known_steps
from lowtide.training.plans_by_shape import PlansByShape

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


class Wide:
    """A model whose gradients take more than its activations; its loop lets go of them between forward and backward.

    That something from before a step goes in it, the counter of the allocator's events sees, and no profiler.
    """

    def __init__(self, share=0.5, rows=32):
        torch.manual_seed(0)
        self.model, self.batch = mlp(8, 128), torch.randn(rows, 128)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step(self.model)
        copied = copy.deepcopy(self.model)
        self.plain = peak_bytes(lambda: self.step(copied, lets_go=True)) + self.there()
        self.budget = self.there() + int(share * (self.plain - self.there()))
        self.losses = []

    def there(self):
        parameters = list(self.model.parameters())
        return bytes_of(parameters) + bytes_of(p.grad for p in parameters if p.grad is not None) + self.batch.nbytes

    def step(self, model, *, lets_go=False):
        loss = model(self.batch).square().mean()
        if lets_go:
            model.zero_grad()
        loss.backward()
        return loss.item()

    def steps(self, count, fit=None, *, lets_go=True):
        """The highest of so many, as the allocator counts them."""
        peaks = []
        for _ in range(count):
            there = self.there()
            peaks.append(there + peak_bytes(lambda: self.losses.append(self.step(self.model, lets_go=lets_go))))
            if fit is not None:
                fit.wait()
            self.optimizer.step()
        return max(peaks)


@pytest.mark.usefixtures("counter_is_there")
@pytest.mark.parametrize("is_seen", [True, False])
def test_room_that_gradients_leave_before_backward_is_used(is_seen, monkeypatch):
    if not is_seen:
        monkeypatch.setattr(GradientsThere, "let_go", lambda self: 0)
    training, plain = Wide(), Wide()
    with lowtide.fit(training.model, budget=training.budget) as fit:
        training.steps(1, fit)
        peak = training.steps(4, fit)
        status, latest = fit.status(), fit._lifecycle.latest
    plain.steps(5)

    assert training.losses == plain.losses
    assert peak <= training.budget < training.plain
    assert (status.in_force and latest.graph.gone_bytes > 0) == is_seen


@pytest.mark.usefixtures("counter_is_there")
@pytest.mark.parametrize("is_seen", [True, False])
def test_a_step_without_a_plan_has_the_room_of_gradients_that_went(is_seen, monkeypatch):
    if not is_seen:
        monkeypatch.setattr(GradientsThere, "let_go", lambda self: 0)
    counted = peaks_by_the_tape(monkeypatch)
    monkeypatch.setattr(PlansByShape, "wants_graph", lambda self, shape: False)
    training = Wide(share=2.0)
    with lowtide.fit(training.model, budget=training.budget) as fit:
        training.steps(1, fit)  # a process's first step allocates more
        took = training.steps(3, fit) - training.there()

    assert (counted[-1] == pytest.approx(took, rel=0.02)) == is_seen


@pytest.mark.usefixtures("counter_is_there")
@pytest.mark.parametrize("is_noted", [True, False])
def test_steps_that_add_to_gradients_after_some_that_let_go_of_them_get_a_plan_of_their_own(is_noted, monkeypatch):
    if not is_noted:
        monkeypatch.setattr(PlansByShape, "note_gradients", lambda self, shape, *, adds: None)
    training, plain = Wide(share=0.8), Wide(share=0.8)
    with lowtide.fit(training.model, budget=training.budget) as fit:
        training.steps(3, fit)
        assert fit._lifecycle.latest.graph.gone_bytes > 0
        training.steps(2, fit, lets_go=False)
        kept = training.steps(3, fit, lets_go=False)
        latest = fit._lifecycle.latest
    plain.steps(3)
    plain.steps(5, lets_go=False)

    assert training.losses == plain.losses
    assert (kept <= max(training.budget, latest.plan.predicted_peak_bytes) and not latest.graph.gone_bytes) == is_noted


@pytest.mark.usefixtures("counter_is_there")
@pytest.mark.parametrize("first", ["watched", "rehearsed"])
def test_plans_made_for_gradients_that_stay_are_made_again_where_they_go(first):
    """``fit`` with a batch plans for gradients that stay."""
    training = Wide(share=0.6)
    with lowtide.fit(training.model, training.batch if first == "rehearsed" else None, budget=training.budget) as fit:
        training.steps(2, fit)
        peak = training.steps(2, fit)
        status, latest = fit.status(), fit._lifecycle.latest

    assert peak <= training.budget and status.in_force
    assert latest.graph.gone_bytes > 0 and latest.plan.predicted_peak_bytes <= training.budget


@pytest.mark.usefixtures("counter_is_there")
@pytest.mark.parametrize("is_handed_on", [True, False])
def test_what_a_step_that_makes_its_gradients_has_proven_the_next_kind_does_not_prove_again(is_handed_on, monkeypatch):
    if not is_handed_on:
        monkeypatch.setattr(known_steps, "_forward_of", lambda graph: object())  # no twin runs the same ops
    proven, run_twice = [], tape.run_twice
    monkeypatch.setattr(tape, "run_twice", lambda op, *how: (proven.append(op), run_twice(op, *how))[1])
    training = Wide(rows=512)
    training.model.zero_grad()
    with lowtide.fit(training.model, budget=training.budget) as fit:
        with monkeypatch.context() as patch:
            patch.setattr(PlansByShape, "_adopt_plans", lambda self: None)  # no answer comes between the two
            training.steps(2)
        fit.wait()
        training.steps(1)
        latest = fit._lifecycle.latest

    assert fit.status().planned_steps == 1 and not latest.keeps_everything
    assert bool(proven) != is_handed_on
