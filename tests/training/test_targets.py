"""Targets, which no call of the model is given: they are there before the step, and part of its peak."""

import pytest
import torch
import torch.nn.functional as F
from support.watched_training import resident_bytes
from torch import nn

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.training.plans_by_shape import PlansByShape
from lowtide.training.targets import likely_target_bytes
from lowtide.training.watched_step import WatchedStep

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, WIDTH = 2048, 64


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
        assert max(peaks) <= allowed
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
    assert first_peaks(monkeypatch, "reserve")[0] > first


def penalised(model: nn.Module, i: int, *, peaks: list[int] | None = None) -> None:
    """Two calls of the model, after the first of which a backward makes a graph: a gradient penalty."""
    numbers = torch.Generator().manual_seed(i)
    real, fake = torch.randn(ROWS, WIDTH, generator=numbers), torch.randn(ROWS, WIDTH, generator=numbers)
    mixed = (real + fake).requires_grad_()

    def step() -> None:
        (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
        loss = model(fake).mean() - model(real).mean() + slope.square().mean()
        loss.backward()

    model.zero_grad()
    taken = peak_bytes(step) + 3 * real.nbytes
    if peaks is not None:
        peaks.append(taken)


@pytest.mark.parametrize("looks", [True, False])
def test_what_later_calls_are_given_is_left_free_from_the_start(monkeypatch, looks):
    resident, plain = resident_bytes(model_of_blocks()), list[int]()
    penalised(model_of_blocks(), 0, peaks=plain)
    allowed = int(0.7 * plain[0])
    monkeypatch.setattr(PlansByShape, "request", lambda *args, **named: None)
    if not looks:
        monkeypatch.setattr("lowtide.training.lifecycle.likely_target_bytes", lambda *args: 0)
    model, peaks = model_of_blocks(), list[int]()
    with lowtide.fit(model, budget=resident + allowed):
        penalised(model, 0, peaks=peaks)

    assert (peaks[0] <= allowed) is looks


def test_targets_are_found_where_a_loop_has_them():
    model, device = nn.Linear(4, 4), torch.device("cpu")
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    both, batch = (torch.randn(8, 2), torch.randn(8, 2)), {"labels": torch.randn(8, 1)}
    rows = torch.randn(800, 4)[8:16]
    others = [torch.randn(8, 4) for _ in range(99)]  # the data set
    of_other_size, output = torch.randn(9, 4), model(x)
    del others[40:], of_other_size

    found = likely_target_bytes(model, ((x,), {}), device)

    assert found == y.nbytes + sum(t.nbytes for t in both) + batch["labels"].nbytes + rows.nbytes
    assert output.requires_grad
