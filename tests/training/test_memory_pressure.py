"""An automatic budget follows free memory: it shrinks before a step fails, and grows back."""

import copy
from types import SimpleNamespace

import pytest
import torch
from support.watched_training import activation_bytes, batch_of, reasons_of, resident_bytes, same, train

import lowtide

pytestmark = pytest.mark.usefixtures("one_thread")


class Machine:
    """Free memory, and a clock that moves two seconds with each step."""

    def __init__(self, free):
        self.free, self.looks, self.now_s = free, 0, 0.0

    def available_bytes(self, device):
        self.looks += 1
        return self.free


@pytest.fixture
def machine(model, monkeypatch):
    machine = Machine(int(resident_bytes(model) + 0.9 * activation_bytes(model, batch_of())))
    monkeypatch.setattr("lowtide.training.budget.available_bytes", machine.available_bytes)
    for of_an_allocator in ("bytes_in_pieces", "bytes_for_segments"):  # of memory that is made up
        monkeypatch.setattr(f"lowtide.training.budget.{of_an_allocator}", lambda of: 0)
    monkeypatch.setattr("lowtide.training.pressure.time", SimpleNamespace(monotonic=lambda: machine.now_s))
    return machine


def steps(model, machine, count=1, seconds=2.0):
    for _ in range(count):
        machine.now_s += seconds
        losses = train(model, [batch_of()])
    return losses


def test_the_budget_shrinks_with_free_memory_and_grows_back(model, machine):
    plain, first_free = copy.deepcopy(model), machine.free
    with lowtide.fit(model) as fit:
        steps(model, machine)
        fit.wait()
        steps(model, machine)
        assert fit.status().in_force
        first, peak = fit.status().budget_bytes, fit.plan.predicted_peak_bytes

        machine.free = int(0.7 * first_free)
        steps(model, machine)
        shrunk = fit.status().budget_bytes
        assert 0.66 * (first - resident_bytes(model)) < shrunk - resident_bytes(model)
        assert shrunk < peak
        assert not fit.status().in_force  # online meanwhile
        fit.wait()
        steps(model, machine)
        assert fit.status().in_force
        assert fit.plan.predicted_peak_bytes <= shrunk
        assert [reason for reason in fit.status().reasons if "free memory" in reason] != []

        machine.free = 2 * first_free
        steps(model, machine, 2)
        assert fit.status().budget_bytes == shrunk  # it may be gone again soon
        steps(model, machine)
        assert fit.status().budget_bytes == first
        assert fit.status().in_force  # the plan for less serves meanwhile
        fit.wait()
        last = steps(model, machine)
        assert fit.status().in_force
        assert shrunk < fit.plan.predicted_peak_bytes <= first
        assert len(fit.plans) == 1
        (told,) = (reason for reason in fit.status().reasons if "free memory" in reason)
        assert told.startswith("free memory has changed")
    assert same(last, steps(plain, machine, 8))


def test_flutter_moves_nothing(model, machine):
    with lowtide.fit(model) as fit:
        first, free = fit.status().budget_bytes, machine.free
        for share in (1, 0.98, 1.02, 0.975, 2, 0.99, 3, 1):
            machine.free = int(share * free)
            steps(model, machine)
        assert fit.status().budget_bytes == first

        machine.free = int(0.6 * free)
        steps(model, machine)
        shrunk = fit.status().budget_bytes
        assert shrunk < first
        for share in (0.6, 1, 0.62, 1, 1, 0.6, 0.61, 0.63):
            machine.free = int(share * free)
            steps(model, machine)
        assert fit.status().budget_bytes == shrunk


@pytest.mark.parametrize("budget", ["60%", "1MiB"])
def test_a_budget_that_was_named_never_moves(model, machine, budget):
    with lowtide.fit(model, budget=budget) as fit:
        steps(model, machine)
        named = fit.status().budget_bytes
        machine.free //= 10
        steps(model, machine, 2)
        assert fit.status().budget_bytes == named


def test_free_memory_is_read_once_a_second_at_most(model, machine):
    with lowtide.fit(model) as fit:
        steps(model, machine)
        fit.wait()  # a step without a plan also asks what an accelerator has
        machine.looks = 0
        steps(model, machine, 20, seconds=0.1)
        assert machine.looks <= 2


def test_a_budget_that_memory_ran_out_at_does_not_come_back(model, machine):
    def refuse(module, args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with lowtide.fit(model) as fit:
        steps(model, machine)
        hook = model.layers[2].register_forward_pre_hook(refuse)
        with pytest.raises(torch.OutOfMemoryError):
            model(batch_of())
        hook.remove()
        lowered = fit.status().budget_bytes
        machine.free *= 2
        steps(model, machine, 5)
        assert fit.status().budget_bytes == lowered
        assert "out of memory: the budget is" in reasons_of(fit)


def test_several_shapes_are_all_planned_again(model, machine):
    sizes, free = (128, 64), machine.free
    with lowtide.fit(model) as fit:
        machine.free = int(0.5 * free)
        for _ in range(3):
            for size in sizes:
                machine.now_s += 2
                train(model, [batch_of(size)])
                fit.wait()
        tight = [plan.budget_bytes for plan in fit.plans]
        assert len(tight) == 2

        machine.free = free
        for _ in range(4):
            machine.now_s += 2
            train(model, [batch_of()])
        fit.wait()
        assert all(plan.budget_bytes == fit.status().budget_bytes > max(tight) for plan in fit.plans)
