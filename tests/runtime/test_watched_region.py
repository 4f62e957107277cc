"""Steps that never call the fitted model itself, watched and planned inside ``fit.step_region``."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.training_steps import is_clean
from support.watched_training import Layered, reasons_of, resident_bytes, same
from torch import nn

import lowtide
from lowtide.measurement.allocator import measuring, peak_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))


class Parts(nn.Module):
    """A model whose step calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Layered(3), Layered(3)
        self.weight = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(2)) / 8)


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
        with measuring("cpu") as counter:
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
    resident = resident_bytes(copied) + sum(p.grad.nbytes for p in copied.parameters() if p.grad is not None) + X.nbytes
    return resident, resident + int(share * peak_bytes(lambda: step(copied, X).backward()))


@pytest.mark.parametrize("step", [parts, functional, called_parameters], ids=lambda step: step.__name__)
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
