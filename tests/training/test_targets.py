"""Targets, which no call of the model is given: they are there before the step, and part of its peak."""

import pytest
import torch
import torch.nn.functional as F
from support.watched_training import resident_bytes
from torch import nn

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.training.plans_by_shape import PlansByShape
from lowtide.training.watched_step import WatchedStep

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, WIDTH = 2048, 64
WORKSPACE = ROWS * WIDTH * 4  # of the loss, which shows when it first runs


def steps(model: nn.Module, fit: lowtide.Fit | None, count: int = 4) -> list[int]:
    """Peaks beside what is resident without the batch."""
    found = []
    for i in range(count):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator(torch.get_default_device()).manual_seed(i))
        y = x.roll(1, 1)
        model.zero_grad()
        found.append(x.nbytes + y.nbytes + peak_bytes(lambda x=x, y=y: F.mse_loss(model(x), y).backward()))
        if fit is not None and i == 1:
            fit.wait()
    return found


def model_of_blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)))
    )


def test_steps_stay_within_the_budget_and_take_what_is_predicted():
    resident = resident_bytes(model_of_blocks())
    allowed = int(0.5 * max(steps(model_of_blocks(), None)))
    model = model_of_blocks()
    with lowtide.fit(model, budget=resident + allowed) as fit:
        peaks = steps(model, fit)
        assert fit.status().planned_steps == 2
        assert fit.graph.resident["batch"] == 2 * ROWS * WIDTH * 4
        assert peaks[0] <= allowed + WORKSPACE and max(peaks[1:]) <= allowed
        assert peaks[-1] == fit.plan.predicted_peak_bytes - resident


def first_peaks(monkeypatch, missing: str | None) -> list[int]:
    """Of two steps within half of the plain peak, with no plan, however late the second one comes."""
    resident = resident_bytes(model_of_blocks())
    allowed = int(0.5 * max(steps(model_of_blocks(), None)))
    model = model_of_blocks()
    with monkeypatch.context() as patch:
        patch.setattr(PlansByShape, "request", lambda *args, **named: None)
        if missing is not None:
            patch.setattr(WatchedStep, missing, lambda self, given: None)
        with lowtide.fit(model, budget=resident + allowed) as fit:
            return [peak - allowed for peak in steps(model, fit, count=2)]


def test_without_counting_them_steps_would_take_more(monkeypatch):
    first, second = first_peaks(monkeypatch, None)
    assert second <= 0
    assert first_peaks(monkeypatch, "_count_inputs")[1] > second
    assert first_peaks(monkeypatch, "_reserve")[0] > first
