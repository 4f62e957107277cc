"""Steps that never call the fitted model itself, watched and planned inside ``fit.step_region``."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from support.quick import thorough_but
from support.training_steps import is_clean
from support.watched_training import Layered, bytes_of, reasons_of, resident_bytes, same
from torch import nn

import lowtide
from lowtide.measurement.allocator import measuring, peak_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.randn(256, 64, generator=torch.Generator(torch.get_default_device()).manual_seed(1))


class Parts(nn.Module):
    """A model whose step calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Layered(3), Layered(3)
        self.weight = nn.Parameter(
            torch.randn(64, 64, generator=torch.Generator(torch.get_default_device()).manual_seed(2)) / 8
        )


def parts(model, x):
    return F.mse_loss(model.decoder(model.encoder(x).tanh()), x)


def functional(model, x):
    for _ in range(8):
        x = F.dropout(F.gelu(F.linear(x, model.weight)), 0.1)
    return x.square().mean()


def called_parameters(model, x):
    state = {name: p * 1.5 for name, p in model.encoder.named_parameters()}
    return torch.func.functional_call(model.encoder, state, x).square().mean()


def penalized(model, x):
    x = x.clone().requires_grad_()
    y = model.encoder(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + model.decoder(gradient).square().mean()


def run(model, step, batches, fit=None, *, region_batch=True):
    """Losses and weights of a loop, and each step's peak above what was there before."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    losses, peaks = [], []
    for n, x in enumerate(batches):
        with measuring(torch.get_default_device()) as counter:
            if fit is None:
                loss = step(model, x)
            else:
                with fit.step_region(x) if region_batch else fit.step_region():
                    loss = step(model, x)
            loss.backward()
        peaks.append(counter.peak)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if fit is not None and n == 1:
            fit.wait()
    return (losses, [p.detach().clone() for p in model.parameters()]), peaks


def budget_for(model, step, share):
    """A share of what the step makes, above weights, gradients and batch."""
    copied = copy.deepcopy(model)
    step(copied, X).backward()
    resident = resident_bytes(copied) + bytes_of(p.grad for p in copied.parameters() if p.grad is not None) + X.nbytes
    return resident, resident + int(share * peak_bytes(lambda: step(copied, X).backward()))


@pytest.mark.parametrize(
    "step",
    thorough_but((functional, called_parameters), (parts, functional, called_parameters)),
    ids=lambda step: step.__name__,
)
def test_a_step_that_never_calls_its_model_is_watched_and_planned_in_a_region(step):
    model = Parts()
    plain = copy.deepcopy(model)
    resident, budget = budget_for(model, step, 0.6)
    with lowtide.fit(model, budget=budget) as fit:
        found, peaks = run(model, step, [X] * 5, fit)
        status = fit.status()
        recomputed = fit.plan.counts["recompute"]
    expected, plain_peaks = run(plain, step, [X] * 5)

    assert same(expected, found)
    assert status.in_force, status
    assert (status.steps, status.planned_steps, status.calls, status.planned_calls) == (5, 3, 5, 3)
    assert recomputed > 0
    assert max(plain_peaks) > budget - resident
    assert max(peaks[2:]) <= budget - resident
    assert max(peaks[1:2]) <= 1.1 * (budget - resident)
    assert is_clean(model)


@pytest.mark.thorough
def test_a_model_that_calls_itself_in_its_region_is_one_call():
    model = Layered()
    plain = copy.deepcopy(model)
    for share, recomputes in ((0.6, True), (4.0, False)):  # under a plan that keeps everything nobody observes calls
        _, budget = budget_for(plain, lambda m, x: m(x).square().mean(), share)
        with lowtide.fit(model, budget=budget) as fit:
            found, _ = run(model, lambda m, x: m(x).square().mean() + m(x / 2).mean(), [X] * 4, fit)
            status, counts = fit.status(), fit.plan.counts
        expected, _ = run(plain, lambda m, x: m(x).square().mean() + m(x / 2).mean(), [X] * 4)
        assert same(expected, found)
        assert (status.steps, status.calls, status.shapes, status.in_force) == (4, 4, 1, True)
        assert status.planned_calls == status.planned_steps >= 2
        assert (counts["recompute"] > 0) is recomputes


def test_a_gradient_penalty_in_a_region_is_part_of_its_loss():
    model = Parts()
    plain = copy.deepcopy(model)
    _, budget = budget_for(model, penalized, 0.7)
    with lowtide.fit(model, budget=budget) as fit:
        found, _ = run(model, penalized, [X] * 4, fit)
        status = fit.status()
    expected, _ = run(plain, penalized, [X] * 4)

    assert same(expected, found)
    assert (status.steps, status.calls) == (4, 4)


def adversarial(model, x, optimizers):
    """Two backwards in one region, with an optimizer's step after each."""
    losses = []
    for part, optimizer in zip((model.decoder, model.encoder), optimizers, strict=True):
        loss = part(model.encoder(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            losses.append(part(x).mean().item())
    return losses


def test_each_backward_in_a_region_ends_a_step_and_what_optimizers_do_between_is_none():
    model = Parts()
    plain = copy.deepcopy(model)
    _, budget = budget_for(model, lambda m, x: m.decoder(m.encoder(x)).square().mean(), 0.6)
    losses = {}
    with lowtide.fit(model, budget=budget) as fit:
        for m in (plain, model):
            optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in (m.decoder, m.encoder)]
            torch.manual_seed(3)
            losses[m] = []
            for n in range(5):
                if m is model:
                    with fit.step_region(X):
                        losses[m] += adversarial(m, X, optimizers)
                else:
                    losses[m] += adversarial(m, X, optimizers)
                if m is model and n >= 1:  # an optimizer whose state has come changes plans
                    fit.wait()
        status, plans = fit.status(), fit.plans

    assert losses[plain] == losses[model]
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert (status.steps, status.plans) == (10, 2) and 4 <= status.planned_steps <= 8, status
    assert all(plan.counts["recompute"] > 0 for plan in plans)
    assert not any("Optimizer" in op.name or "_foreach" in op.name for plan in plans for op in plan.ops)
    assert is_clean(model)


def test_without_a_batch_the_ops_tell_another_size():
    model = Parts()
    plain = copy.deepcopy(model)
    batches = [X, X, X, X[:100], X]
    _, budget = budget_for(model, parts, 0.6)
    with lowtide.fit(model, budget=budget) as fit:
        found, _ = run(model, parts, batches[:3], fit, region_batch=False)
        assert fit.status().in_force
        with fit.step_region():
            loss = parts(model, X[:100])
        loss.backward()
        assert not fit.status().in_force
        assert "other ops than its plan" in fit.status().why_not
    expected, _ = run(plain, parts, batches[:3])
    assert same(expected, found)


def test_two_regions_and_one_backward_are_one_step():
    model = Parts()
    plain = copy.deepcopy(model)
    _, budget = budget_for(model, parts, 1.2)
    weights = []
    with lowtide.fit(model, budget=budget) as fit:
        for m in (plain, model):
            torch.manual_seed(3)
            for n in range(4):
                losses = []
                for x in (X, X + 1):
                    if m is model:
                        with fit.step_region(x):
                            losses.append(parts(m, x))
                    else:
                        losses.append(parts(m, x))
                sum(losses).backward()
                if m is model and n == 1:
                    fit.wait()
            weights.append([p.grad.clone() for p in m.parameters() if p.grad is not None])
        status = fit.status()

    assert all(map(torch.equal, *weights))
    assert (status.steps, status.planned_steps, status.calls) == (4, 2, 8)


def test_more_regions_in_a_backward_than_planned_are_told():
    model = Parts()
    _, budget = budget_for(model, parts, 0.6)
    with lowtide.fit(model, budget=budget) as fit:
        run(model, parts, [X] * 3, fit)
        losses = []
        for x in (X, X + 1):
            with fit.step_region(x):
                losses.append(parts(model, x))
        sum(losses).backward()
        assert not fit.status().in_force
        assert "a step ran 2 calls of the model, and its plan is for 1" in reasons_of(fit)


def test_an_error_in_a_region_leaves_nothing_behind_and_the_next_step_is_right():
    model = Parts()
    plain = copy.deepcopy(model)
    _, budget = budget_for(model, parts, 0.6)
    with lowtide.fit(model, budget=budget) as fit:
        for _ in range(2):  # watched, and planned
            with pytest.raises(ZeroDivisionError):
                with fit.step_region(X):
                    parts(model, X)
                    1 / 0  # noqa: B018
            run(model, parts, [X] * 2, fit)
            run(plain, parts, [X] * 2)
        assert fit.status().in_force
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert is_clean(model)


def test_backward_on_another_thread_leaves_the_region_to_the_thread_that_opened_it():
    model = Parts()
    plain = copy.deepcopy(model)
    _, budget = budget_for(model, functional, 0.6)
    with lowtide.fit(model, budget=budget) as fit:
        run(model, functional, [X] * 3, fit)
        with fit.step_region(X):
            loss = functional(model, X)
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
    run(plain, functional, [X] * 3)
    functional(plain, X).backward()
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters()) if p.grad is not None
    )
    assert is_clean(model)


def test_a_region_inside_a_call_of_the_model_is_part_of_that_call():
    model = Layered()
    with lowtide.fit(model, budget="80%") as fit:
        forward = model.forward

        def in_region(x):
            with fit.step_region(x):
                return forward(x)

        model.forward = in_region
        for _ in range(3):
            model(X).square().mean().backward()
            fit.wait()
        status, paths = fit.status(), {frame.path for frame in fit.plan.frames}
    assert (status.calls, status.planned_calls) == (3, 2)
    assert "layers.0" in paths
