"""Whatever a loop does with a fitted model: its plan is in force, or the user is told that it is not, and why."""

import copy
import gc
import threading
import weakref
from contextlib import suppress

import pytest
import torch
from support.quick import thorough_but
from support.watched_training import Layered, batch_of, reasons_of, resident_bytes, same, train
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.device import allocation_counter
from lowtide.measurement.allocator import peak_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


def loss_of(y):
    return y.square().mean()


@pytest.fixture(params=thorough_but(("watched",), ("watched", "with a batch")))
def fit(request, model, budget):
    """A fit of either kind, planned."""
    x = batch_of()
    more = {"batch": x, "step": lambda model, x: loss_of(model(x))} if request.param == "with a batch" else {}
    with lowtide.fit(model, **more, budget=budget + 100_000) as fit:
        train(model, [x])
        fit.wait()
        train(model, [x])
        assert fit.status().in_force
        yield fit


def test_two_backwards_of_one_call_are_one_step(model, fit):
    def loop(model):
        model.zero_grad()
        y = model(batch_of())
        a, b = loss_of(y), y.sin().mean()
        a.backward(retain_graph=True)
        b.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = copy.deepcopy(model)
    before = fit.status().steps
    for _ in range(3):
        torch.manual_seed(1)
        expected = loop(plain)
        torch.manual_seed(1)
        assert all(map(torch.equal, expected, loop(model)))
        fit.wait()
    status = fit.status()
    assert (status.steps, status.in_force, "did not see" in reasons_of(fit)) == (before + 3, True, False)


def test_a_step_that_leaves_a_graph_behind_is_a_step(model, budget):
    """As in a script without functions: what was computed for a log lives on into the next step."""
    with lowtide.fit(model, budget=budget + 300_000) as fit:
        logged = []
        for _ in range(4):
            y = model(batch_of())
            logged.append(y.sin().abs().mean())  # not detached
            loss_of(y).backward()
            model.zero_grad()
        assert fit.status().steps >= 3
        assert fit.wait().status().plans == 1


def test_graphs_that_are_held_for_ever_make_no_endless_step(model, budget):
    with lowtide.fit(model, budget=budget + 300_000) as fit:
        logged = []
        for _ in range(20):
            y, z = model(batch_of()), model(batch_of())
            logged.append(z.sin().abs().mean())
            loss_of(y).backward()
        assert fit.status().steps > 0
        assert "holds on to the graphs of earlier steps" in reasons_of(fit)


def sum_of_two(model):
    y, z = model(batch_of()), model(batch_of())
    return loss_of(y + z), y.sin().abs().mean()


def gradient_penalty(model):
    """As of WGAN-GP: neither the output nor the gradient is reached whole by the loss's backward."""
    x = batch_of().requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return loss_of(model(batch_of())) + gradient.norm(dim=-1).mean(), y, gradient


@pytest.mark.parametrize("calls", [sum_of_two, gradient_penalty])
def test_one_backward_of_several_calls_ends_their_step_whatever_is_held(model, budget, calls):
    with lowtide.fit(model, budget=budget + 2_000_000) as fit:
        for _ in range(4):
            loss, *held = calls(model)
            loss.backward()
            model.zero_grad()
        assert fit.status().steps >= 3 and held
        fit.wait()
        loss, *held = calls(model)
        assert fit.status().plans == 1
        loss.backward()
        assert fit.status().in_force and "holds on" not in reasons_of(fit)


def test_the_backward_of_a_copy_in_the_middle_of_a_step_ends_nothing(model, fit):
    other = copy.deepcopy(model)
    before = fit.status()
    loss = loss_of(model(batch_of()))
    loss_of(other(batch_of())).backward()
    loss.backward()

    status = fit.status()
    assert (status.steps, status.planned_steps) == (before.steps + 1, before.planned_steps + 1)
    assert status.in_force
    assert before.reasons == () and len(status.reasons) == allocation_counter.is_there()
    assert all("another model's step or backward ran in it" in reason for reason in status.reasons)
    train(model, [batch_of()])
    assert fit.status().in_force  # its plan is as good as before


def test_a_copy_that_trains_for_ever_is_told_until_the_model_itself_does(model, fit):
    train(copy.deepcopy(model), [batch_of()] * 16)
    assert not fit.status().in_force
    assert "a copy of it is" in reasons_of(fit)
    train(model, [batch_of()])
    assert fit.status().in_force
    assert fit.status().reasons == ()


def test_a_thread_that_died_after_its_forward_pass_stops_nobody(model, fit):
    plain = copy.deepcopy(model)
    thread = threading.Thread(target=model, args=(batch_of(),))
    thread.start()
    thread.join()

    assert same(train(plain, [batch_of()] * 2), train(model, [batch_of()] * 2))
    assert fit.status().in_force
    assert fit.status().reasons == ()


def test_forward_passes_on_a_worker_and_backward_here_are_steps(model, budget):
    plain = copy.deepcopy(model)
    todo, done = [threading.Event() for _ in range(3)], [threading.Event() for _ in range(3)]
    outputs, modes, device = [], [], torch.get_default_device()

    def work():
        for start, end in zip(todo, done, strict=True):
            start.wait()
            torch.manual_seed(1)
            outputs.append(model(batch_of(device=device)))
            modes.append(len(_get_current_dispatch_mode_stack()))
            end.set()

    with lowtide.fit(model, budget=budget + 300_000) as fit:
        worker = threading.Thread(target=work)
        worker.start()
        for start, end in zip(todo, done, strict=True):
            torch.manual_seed(1)
            loss_of(plain(batch_of())).backward()
            start.set()
            end.wait()
            loss_of(outputs.pop()).backward()
        worker.join()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
        assert fit.status().steps == 2  # the third ends with the next call
        assert "another thread than the forward pass" in reasons_of(fit)
    assert max(modes) == 1, "each step left its own mode on the worker"


def test_a_model_dropped_in_the_middle_of_a_step_takes_its_watch_along(budget):
    model = Layered()
    fit = lowtide.fit(model, budget=budget)
    y = model(batch_of())
    assert len(_get_current_dispatch_mode_stack()) == 1
    del model, fit, y
    assert _get_current_dispatch_mode_stack() == []


def test_a_budget_that_a_gradient_penalty_cannot_keep_is_named():
    def step(model, x):
        x = x.detach().requires_grad_()
        loss = loss_of(model(x))
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()

    with pytest.raises(lowtide.BudgetInfeasibleError):
        lowtide.fit(Layered(), batch_of(), budget="5%", step=step)


def test_a_step_of_more_calls_than_planned_keeps_the_budget(model):
    def step(model=model):
        (loss_of(model(x)) + loss_of(model(x))).backward()

    x = batch_of()
    plain = copy.deepcopy(model)
    step(plain)
    limit = int(0.75 * peak_bytes(lambda: step(plain)))
    step()
    with lowtide.fit(model, x, budget=2 * resident_bytes(model) + x.nbytes + limit) as fit:
        assert fit.plan.counts["recompute"] == 0
        step()
        assert "2 calls of the model, and its plan is for 1" in reasons_of(fit)
        assert not fit.status().in_force
        for _ in range(2):
            assert peak_bytes(step) <= 1.1 * limit  # 16 KiB, in the watched step
            fit.wait()
        assert fit.status().in_force
        assert peak_bytes(step) <= limit


def test_a_call_without_backward_is_no_part_of_the_next_step(model, fit):
    for _ in range(3):
        model(batch_of())
        loss_of(model(batch_of())).backward()
    assert fit.status().in_force


def test_layers_that_a_rehearsal_skipped_are_noticed(budget):
    class Skipping(Layered):
        num_layers = 1

        def forward(self, x):
            for layer in self.layers[: self.num_layers]:
                x = x + layer(x)
            return x

    model = Skipping()
    with lowtide.fit(model, batch_of(), budget=budget + 100_000) as fit:
        assert fit.plan.counts["recompute"] == 0
        model.num_layers = 4
        train(model, [batch_of()])
        assert fit.status().why_not == "the last step ran other ops than its plan"


def test_a_failed_backward_leaves_no_memory_behind(model, fit):
    def interrupt(_):
        raise KeyboardInterrupt

    y = model(batch_of())
    gone = weakref.ref(y)
    y.register_hook(interrupt)
    with suppress(KeyboardInterrupt):
        loss_of(y).backward()
    gc.disable()
    try:
        del y
        assert gone() is None
    finally:
        gc.enable()


def test_what_is_not_in_force_is_said_in_every_report(model, fit):
    assert "NOT IN FORCE" not in fit.report() + str(fit.status())
    loss_of(model.forward(batch_of())).backward()
    found = fit.verify(batch_of(), rounds=0)
    assert found.equal
    assert found.in_force is False
    for text in (str(found), fit.report(), str(fit.status())):
        assert "NOT IN FORCE" in text
        assert "its forward() was called directly" in " ".join(text.split())
    train(model, [batch_of()])
    assert str(fit.verify(batch_of(), rounds=0)).startswith("Loss, gradients and buffers bitwise equal in a rehearsal")
    fit.remove()
    assert str(fit.status()).startswith("NOT IN FORCE: the fit was removed.")


def test_shapes_that_have_no_plan_for_one_cause_are_one_line(model, budget, caplog):
    model.compile(backend="eager")
    with lowtide.fit(model, budget=budget) as fit:
        for rows in (32, 48, 64, 32):
            train(model, [batch_of(rows)])
        lines = [line for line in fit.status().reasons if line.startswith("no plan")]
    assert lines == ["no plan for 3 input shapes, they run online: UnsupportedModelError: the model is compiled"]
    assert sum("no plan for" in record.message for record in caplog.records) == 1


def test_a_rehearsal_through_another_model_leaves_that_ones_gradients_alone(model):
    critic, x = Layered(layers=2), batch_of()
    loss_of(critic(x)).backward()
    before = [p.grad.clone() for p in critic.parameters()]
    with lowtide.fit(model, x, budget="80%", step=lambda model, x: loss_of(critic(model(x)))) as fit:
        fit.verify(x, rounds=1)
        assert all(torch.equal(p.grad, g) for p, g in zip(critic.parameters(), before, strict=True))


def test_parameters_may_get_other_memory_before_backward(model, fit):
    def step(model):
        model.zero_grad()
        loss = loss_of(model(batch_of()))
        for p in model.parameters():
            p.data = p.data * 1.5
        loss.backward()
        return [p.grad for p in model.parameters()]

    plain = copy.deepcopy(model)
    for seed in range(2):
        torch.manual_seed(seed)
        expected = step(plain)
        torch.manual_seed(seed)
        assert all(map(torch.equal, expected, step(model)))
        assert fit.status().in_force == (seed == 0 or not allocation_counter.is_there())
    assert ("a step under its plan took up to " in reasons_of(fit)) == allocation_counter.is_there()


def test_a_model_that_is_called_inside_a_backward_trains_as_plain_and_that_is_told(model, fit):
    plain = copy.deepcopy(model)
    x = batch_of(32)
    found = []
    for trained in (plain, model):
        torch.manual_seed(0)
        loss = torch.ones((), requires_grad=True)

        def again(grad, trained=trained):
            with torch.enable_grad():
                trained(x).square().mean().backward()

        loss.register_hook(again)
        (2 * loss).backward()
        found.append([p.grad for p in trained.parameters()])
    assert all(map(torch.equal, *found))
    assert "the model is called inside a backward pass" in reasons_of(fit)


def test_a_call_that_a_checkpoint_runs_again_is_no_call_inside_a_backward(model, fit):
    checkpoint(model, batch_of(32).requires_grad_(), use_reentrant=False).square().mean().backward()
    assert "inside a backward pass" not in reasons_of(fit)
