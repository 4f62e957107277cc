"""``model.to`` while a model is fitted, as PyTorch does it for DTensors and float8 weights: it swaps their contents."""

import pytest
import torch
from torch import nn

import lowtide

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, WIDTH, STEPS = 256, 64, 6


@pytest.fixture
def swapped_parameters():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def train(fraction: str | None) -> tuple[list[float], list[int]]:
    """Losses, and planned steps after each step; the model is moved after the first step and after a planned one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    fit = lowtide.fit(model, budget=fraction, optimizer=optimizer) if fraction else None
    losses, planned = [], []
    for i in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator(torch.get_default_device()).manual_seed(i))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
        if i in (0, STEPS - 2):
            model.to(torch.get_default_device())
        if fit is not None:
            fit.wait()
            planned.append(fit.status().planned_steps)
    return losses, planned


def test_parameters_may_be_swapped_between_steps(swapped_parameters):
    plain, _ = train(None)
    losses, planned = train("60%")
    assert losses == plain
    assert planned[-1] == STEPS - 1, "the steps after a move are planned too"
