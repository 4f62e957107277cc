"""Parameters that are frozen and thawed in mid-training: each kind of step has a plan of its own."""

import pytest
import torch
from support.watched_training import bytes_of, resident_bytes
from torch import nn

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.training.past_training import PastTraining

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, WIDTH, THAWED_AT = 1024, 64, 3


def train(model: nn.Module, fit: lowtide.Fit | None, count: int = 6) -> tuple[list[torch.Tensor], list[int]]:
    losses, peaks = [], []
    for i in range(count):
        model[0].requires_grad_(i >= THAWED_AT)
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator(torch.get_default_device()).manual_seed(i))

        def step(x: torch.Tensor = x) -> None:
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.detach().clone())

        before = bytes_of(p.grad for p in model.parameters() if p.grad is not None)
        peaks.append(before + peak_bytes(step))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.add_(p.grad, alpha=-1e-2)
                    p.grad = None
        if fit is not None:
            fit.wait()
    return losses, peaks


def small_blocks() -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(4))
    model = nn.Sequential(*blocks)
    model[0].requires_grad_(False)
    return model


def test_steps_before_and_after_are_planned_and_bitwise():
    plain, ours = small_blocks(), small_blocks()
    losses, peaks = train(plain, None)
    allowed = int(0.7 * max(peaks))
    with lowtide.fit(ours, budget=resident_bytes(ours) + ROWS * WIDTH * 4 + allowed) as fit:
        found, taken = train(ours, fit)
        assert fit.status().planned_steps == 4  # each kind is watched once
    assert max(taken) <= 1.01 * allowed
    assert all(map(torch.equal, losses, found))
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))


def test_without_telling_them_apart_a_step_runs_under_the_plan_of_others(monkeypatch):
    monkeypatch.setattr(PastTraining, "trained_since", lambda self: "")
    ours = small_blocks()
    with lowtide.fit(ours, budget="1GiB") as fit:
        train(ours, fit)
        assert fit.status().planned_steps < 4 and fit.status().shapes == 1
