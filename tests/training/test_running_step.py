"""The phases of a step, and that it is thrown away whole, whatever it ends with."""

import copy
import threading

import pytest
import torch
from support.watched_training import Layered, batch_of, reasons_of, same, train
from torch import nn

import lowtide
from lowtide.step.seam import hooks_in_place, modes_in_place
from lowtide.training.lifecycle import Lifecycle
from lowtide.training.planned_step import PlannedStep
from lowtide.training.running_step import Phase

pytestmark = pytest.mark.usefixtures("one_thread")


def is_untouched(step) -> bool:
    return not step.has_begun and step.phase is Phase.IDLE and not step.seams and step.thread is None


def test_a_step_waits_after_its_call_and_is_gone_after_its_backward(model, budget):
    seen = []
    with lowtide.fit(model, budget=budget) as fit:
        lifecycle = fit._lifecycle
        model.layers[1].register_forward_hook(lambda *_: seen.append(lifecycle.step.phase))
        assert is_untouched(lifecycle.step)
        loss = model(batch_of()).square().mean()
        assert lifecycle.step.phase is Phase.WAITING and seen == [Phase.FORWARD]
        loss.backward()
        assert is_untouched(lifecycle.step)


def test_a_retained_graph_leaves_the_step_in_backward(model, budget):
    with lowtide.fit(model, budget=budget) as fit:
        loss = model(batch_of()).square().mean()
        loss.backward(retain_graph=True)
        assert fit._lifecycle.step.phase is Phase.BACKWARD
        loss.backward()
        assert is_untouched(fit._lifecycle.step)


def test_a_step_whose_backward_ran_elsewhere_is_over_and_goes_with_the_next_call(model, budget):
    with lowtide.fit(model, budget=budget) as fit:
        loss = model(batch_of()).square().mean()
        other = threading.Thread(target=loss.backward)
        other.start()
        other.join()
        step = fit._lifecycle.step
        assert step.phase is Phase.OVER and step.spoiled
        model(batch_of())
        assert fit._lifecycle.step is not step and fit._lifecycle.step.phase is Phase.WAITING


@pytest.mark.own_errors
@pytest.mark.parametrize("end", ["removed", "an error of our own"])
def test_a_step_that_is_given_up_in_a_call_leaves_nothing_in_place(end, monkeypatch):
    """The tape's module calls are open: it leaves its region when the call returns."""
    monkeypatch.setattr(PlannedStep, "needs_whole_step", True)
    model = Layered()
    plain = copy.deepcopy(model)
    with lowtide.fit(model, batch_of(), method="full") as fit:
        lifecycle, tape = fit._lifecycle, fit._lifecycle.latest.tape
        gives_up = {"removed": fit.remove, "an error of our own": lambda: lifecycle.fail(KeyError("of our own"))}[end]
        hook = model.layers[2].register_forward_pre_hook(lambda *_: gives_up())
        assert same(train(plain, [batch_of()]), train(model, [batch_of()]))
        hook.remove()
        assert is_untouched(lifecycle.step)
        assert modes_in_place() == [] and hooks_in_place() == []
        assert tape._marked == [] and tape._callers == []  # the region was left
        if end != "removed":
            assert "KeyError" in reasons_of(fit)
            assert same(train(plain, [batch_of()]), train(model, [batch_of()]))
            assert fit.status().in_force


@pytest.mark.own_errors
def test_no_step_begins_in_a_call_whose_step_was_given_up(model, budget):
    calls = []

    class Again(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, depth=1):
            if depth:
                Lifecycle.fail(fit._lifecycle, KeyError("of our own"))
                x = self(x, 0)
            calls.append(fit._lifecycle.step.has_begun)
            return self.inner(x)

    twice = Again(model)
    with lowtide.fit(twice, budget=budget) as fit:
        twice(batch_of()).square().mean().backward()
        assert calls == [False, False]
        assert torch.is_grad_enabled() and is_untouched(fit._lifecycle.step)
