"""Training loops of every kind under a watch: the same gradients, and nothing left behind."""

import copy
import gc
import pickle
import threading
from contextlib import nullcontext

import pytest
import torch
from support.training_steps import differing, outcome
from support.watched_training import Layered, batch_of, same
from torch import nn
from torch.autograd import graph as autograd_graph
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide.step.seam import hooks_of_ours_are_on

RESIDENT_BYTES = 6 * (64 * 64 + 64) * 4


class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))


def loss_of(y):
    return torch.log_softmax(y, -1).square().mean()


def loss_outside(model, x):
    loss_of(model(x)).backward()


def two_calls_one_backward(model, x):
    a, b = model(x), model(x * 2)
    (loss_of(a) + loss_of(b)).backward()


def one_call_two_backwards(model, x):
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward()


def two_calls_two_backwards(model, x):
    a, b = loss_of(model(x)), loss_of(model(x * 2))
    a.backward()
    b.backward()


def a_call_without_backward_first(model, x):
    model(x)
    loss_of(model(x)).backward()


def generation_between(model, x):
    y = model(x)
    with torch.no_grad():
        for _ in range(3):
            model(x)
    loss_of(y).backward()


def an_error_in_the_loss(model, x):
    try:
        model(x)
        raise ValueError("in the loss")
    except ValueError:
        pass
    loss_of(model(x)).backward()


def interrupted_backward(model, x):
    def interrupt(gradient):
        raise KeyboardInterrupt

    y = model(x)
    y.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss_of(y).backward()
    for p in model.parameters():
        p.grad = None
    del y
    loss_of(model(x)).backward()


def a_mode_around_the_call(model, x):
    with FlopCounterMode(display=False) as counter:
        y = model(x)
    loss_of(y).backward()
    assert counter.get_total_flops() > 0


def a_mode_around_loss_and_backward(model, x):
    y = model(x)
    with FlopCounterMode(display=False):
        loss_of(y).backward()


def saved_on_the_cpu(model, x):
    with autograd_graph.save_on_cpu():
        y = model(x)
    loss_of(y).backward()


def copied_and_pickled_between(model, x):
    y = model(x)
    copy.deepcopy(model)
    pickle.dumps(model.state_dict())
    loss_of(y).backward()


def reentrant_checkpoint_in_the_loss(model, x):
    loss_of(checkpoint(lambda v: torch.tanh(v) * v, model(x), use_reentrant=True)).backward()


def backward_on_another_thread(model, x):
    loss = loss_of(model(x))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def gradients_by_autograd_grad(model, x):
    found = torch.autograd.grad(loss_of(model(x)), list(model.parameters()))
    for p, gradient in zip(model.parameters(), found, strict=True):
        p.grad = gradient.clone()


def gradient_penalty(model, x):
    x = x.clone().requires_grad_()
    loss = loss_of(model(x))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()


def parameters_written_between(model, x):
    loss = loss_of(model(x))
    with torch.no_grad():
        for module in model:
            module[0].bias.add_(0.5)  # backward does not read it, recipes do
    loss.backward()


def parameters_given_other_memory(model, x):
    loss = loss_of(model(x))
    for p in model.parameters():
        p.data = p.data * 2
    loss.backward()


LOOPS = [
    loss_outside, two_calls_one_backward, one_call_two_backwards, two_calls_two_backwards,
    a_call_without_backward_first, generation_between, an_error_in_the_loss, interrupted_backward,
    a_mode_around_the_call, a_mode_around_loss_and_backward, saved_on_the_cpu, copied_and_pickled_between,
    reentrant_checkpoint_in_the_loss, backward_on_another_thread, gradients_by_autograd_grad, gradient_penalty,
    parameters_written_between, parameters_given_other_memory,
]  # fmt: skip


def run(loop, model, x):
    torch.manual_seed(1)
    loop(model, x)
    found = outcome(model, torch.zeros(()))
    model.zero_grad()
    return found


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_watched_loop_gives_the_same_gradients_and_leaves_nothing_behind(loop):
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(256, 64)
    plain = copy.deepcopy(model)
    budget_bytes = RESIDENT_BYTES + 6 * x.nbytes  # two of three activations: something has to go

    with lowtide.fit(model, budget=budget_bytes) as fit:
        for _ in range(3):
            expected = run(loop, plain, x)
            found = run(loop, model, x)
            assert differing(expected, found) == []
        lifecycle = fit._lifecycle
        gc.collect()
        expected = (
            "more than the budget",
            "no plan fits",
            "on another thread",
            "save_on_cpu is around",
            "without a switch",
        )
        assert [r for r in fit.status().reasons if not any(words in r for words in expected)] == []

    assert _get_current_dispatch_mode_stack() == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert autograd_graph._engine_run_backward.__module__ == "torch.autograd.graph"
    assert lifecycle.step.watch is None
    written = torch.zeros(1)
    written.add_(1)
    assert written._version == 1, "a dispatch key was left excluded: versions count no more"


def adversaries(both, fits=(), region=nullcontext):
    """A generator and a discriminator in turns: the losses, and the weights at the end."""
    maker, judge = both
    makers, judges = (torch.optim.Adam(m.parameters(), lr=0.01) for m in both)
    real = torch.randn(256, 64, generator=torch.Generator(torch.get_default_device()).manual_seed(2))
    torch.manual_seed(1)
    losses = []
    for n in range(6):
        with region():
            made = maker(torch.randn(256, 64))
            judged = judge(torch.cat([made.detach(), real])).square().mean()
            judged.backward()
            judges.step()
            fooled = (1 - judge(made)).square().mean()
            fooled.backward()
            makers.step()
        makers.zero_grad()
        judges.zero_grad()
        losses += [judged.item(), fooled.item()]
        if n >= 2:  # an optimizer whose state has come changes plans
            for fit in fits:
                fit.wait()
    return losses, [p.detach().clone() for p in both.parameters()]


def layered_pair():
    torch.manual_seed(0)
    return nn.ModuleList([Layered(3), Layered(3)])


def test_two_watched_models_that_train_against_each_other_step_as_plainly():
    both = layered_pair()
    expected = adversaries(copy.deepcopy(both))
    fits = [lowtide.fit(model, budget="90%") for model in both]
    found = adversaries(both, fits)
    reasons = [reason for fit in fits for reason in fit.status().reasons]
    planned = [fit.status().planned_steps for fit in fits]
    for fit in fits:
        fit.remove()

    assert same(expected, found)
    # The first step of the maker has the judge's optimizer in it, which then makes its state: no later step does.
    assert planned[1] >= 6
    assert not any("saved whole" in reason for reason in reasons), reasons


def side_by_side(pair, fits=(), steps=5):
    """Both run forward before either runs backward, each with a loss of its own."""
    torch.manual_seed(3)
    losses = []
    for _ in range(steps):
        pair.zero_grad()
        found = [model(batch_of()).square().mean() for model in pair]
        for loss in found:
            loss.backward()
        losses += [loss.item() for loss in found]
        del found, loss
        for fit in fits:
            fit.wait()
    return losses, [p.grad.clone() for p in pair.parameters()]


def test_two_fits_whose_steps_interleave_are_both_planned():
    pair = layered_pair()
    expected = side_by_side(copy.deepcopy(pair))
    fits = [lowtide.fit(model, budget="60%") for model in pair]
    found = side_by_side(pair, fits)
    status = [fit.status() for fit in fits]
    recomputed = [fit.plan.counts["recompute"] for fit in fits]
    for fit in fits:
        fit.remove()

    assert same(expected, found)
    assert [s.planned_steps for s in status] == [4, 4], status
    assert min(recomputed) > 0
    told = ["is in its budget alone" in " ".join(s.reasons) for s in status]
    assert told == [True, False]  # the second one's steps end inside no other's
    assert not any("did not see" in reason for s in status for reason in s.reasons)


def test_a_backward_of_another_model_is_no_part_of_a_watched_step():
    pair = layered_pair()
    pair.zero_grad()
    with lowtide.fit(pair[0], budget="60%") as fit:
        other = pair[1](batch_of()).square().mean()
        loss = pair[0](batch_of()).square().mean()
        other.backward()
        loss.backward()
        fit.wait()
        with_other = len(fit.graph.ops)
    with lowtide.fit(pair[0], budget="60%") as fit:
        pair[0](batch_of()).square().mean().backward()
        fit.wait()
        assert with_other - len(fit.graph.ops) <= 1  # what a loss begins with is made before its backward begins


def test_two_fits_in_two_threads_are_both_planned():
    pair = layered_pair().eval()  # without dropout: the threads share a generator
    fits = [lowtide.fit(model, budget="60%") for model in pair]
    barrier, found = threading.Barrier(2), [None, None]

    def run(n):
        gradients = []
        for _ in range(5):
            barrier.wait()
            pair[n].zero_grad()
            loss = pair[n](batch_of(device=next(pair.parameters()).device)).square().mean()
            barrier.wait()
            loss.backward()
            gradients = [p.grad.clone() for p in pair[n].parameters()]
            del loss
            fits[n].wait()
        found[n] = gradients

    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status = [fit.status() for fit in fits]
    for fit in fits:
        fit.remove()

    assert [s.planned_steps for s in status] == [4, 4], status
    assert not any("thread" in reason or "did not see" in reason for s in status for reason in s.reasons)
    for model, gradients in zip(pair, found):
        model.zero_grad()
        model(batch_of()).square().mean().backward()
        assert all(map(torch.equal, gradients, [p.grad for p in model.parameters()]))


def test_two_models_are_one_fit_in_a_region():
    both = layered_pair()
    expected = adversaries(copy.deepcopy(both))
    with lowtide.fit(both, budget="90%") as fit:
        found = adversaries(both, [fit], fit.step_region)
        status = fit.status()

    assert same(expected, found)
    assert status.in_force and status.planned_steps >= 6, (status.planned_steps, status.reasons, status.why_not)


def test_a_fit_that_is_removed_while_its_watch_is_away_leaves_nothing_in_place():
    pair = layered_pair()
    first, second = (lowtide.fit(model, budget="60%") for model in pair)
    held = pair[0](batch_of()).square().mean()
    handle = pair[1].layers[0].register_forward_hook(lambda *_: first.remove())
    loss = pair[1](batch_of()).square().mean()
    handle.remove()
    loss.backward()
    second.remove()
    held.backward()

    assert _get_current_dispatch_mode_stack() == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_model_that_is_checkpointed_inside_is_watched_beside_another_fit():
    """A backward through such a call shows no leaves: the call's nodes tell whose it is."""

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Layered(2)

        def forward(self, x):
            return checkpoint(self.part, x.requires_grad_(), use_reentrant=True)

    ours, other = Inside(), Layered(2)
    with lowtide.fit(ours, budget="90%") as fit, lowtide.fit(other, budget="90%") as beside:
        for _ in range(3):
            losses = [model(batch_of()).square().mean() for model in (ours, other)]
            for loss in losses:
                loss.backward()
            del loss, losses
        assert fit.status().steps == beside.status().steps == 3
        assert not any("did not see" in reason for f in (fit, beside) for reason in f.status().reasons)


def test_a_step_whose_graph_is_still_held_is_away_while_plans_are_verified():
    """A collective's thread may hold a loss when its backward has returned."""
    model = Layered()
    found = []

    def step(model, batch):
        found.append(hooks_of_ours_are_on())
        return model(batch).square().mean()

    with lowtide.fit(model, batch_of(), budget="60%", step=step) as fit:
        loss = step(model, batch_of(rows=384))  # not planned: watched
        loss.backward(retain_graph=True)
        found.clear()
        proof = fit.verify(batch_of(), rounds=0)

    assert proof.equal and found[0] is False, "the plain step ran under the watch of the last one"
