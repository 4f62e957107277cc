"""Targets, which no call of the model is given: they are there before the step, and part of its peak."""

import gc

import pytest
import torch
import torch.nn.functional as F
from support.watched_training import resident_bytes
from torch import nn

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.training.plans_by_shape import PlansByShape
from lowtide.training.targets import likely_target_bytes

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
        assert fit.status().planned_steps >= 2  # one more where the first plan comes soon
        assert fit.graph.resident["batch"] == 2 * ROWS * WIDTH * 4
        assert peaks[0] <= 1.02 * allowed  # what a kernel of a device takes beside what it makes shows when it runs
        assert max(peaks[1:]) <= allowed
        assert peaks[-1] == fit.plan.predicted_peak_bytes - resident


def first_peaks(monkeypatch, missing: str | None) -> list[int]:
    """Of two steps within half of the plain peak, with no plan, however late the second one comes."""
    resident = resident_bytes(model_of_blocks())
    allowed = int(0.5 * max(steps(model_of_blocks(), None)))
    model = model_of_blocks()
    with monkeypatch.context() as patch:
        patch.setattr(PlansByShape, "request", lambda *args, **named: None)
        if missing is not None:
            patch.setattr(OnlineTape, missing, lambda self, *given: None)
        with lowtide.fit(model, budget=resident + allowed) as fit:
            return [peak - allowed for peak in steps(model, fit, count=2)]


def test_without_counting_them_steps_would_take_more(monkeypatch):
    first, second = first_peaks(monkeypatch, None)
    assert second <= 0
    assert first_peaks(monkeypatch, "count_input")[1] > second
    assert first_peaks(monkeypatch, "reserve")[0] > first


def penalised(model: nn.Module, i: int) -> None:
    """Two calls of the model, after the first of which a backward makes a graph: a gradient penalty."""
    numbers = torch.Generator(torch.get_default_device()).manual_seed(i)
    real, fake = torch.randn(ROWS, WIDTH, generator=numbers), torch.randn(ROWS, WIDTH, generator=numbers)
    mixed = (real + fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed).square().sum(), mixed, create_graph=True)
    loss = model(fake).square().mean() - model(real).square().mean() + slope.square().mean()
    loss.backward()


def test_what_was_just_made_is_left_free_until_an_op_reads_it(monkeypatch):
    """Also where a backward makes a graph before."""
    reserved, reserve = [], OnlineTape.reserve
    monkeypatch.setattr(OnlineTape, "reserve", lambda self, size: (reserved.append(size), reserve(self, size)))
    model = model_of_blocks()
    with lowtide.fit(model, budget="1GiB"):
        penalised(model, 0)
    each = ROWS * WIDTH * 4

    assert reserved == [2 * each, each, 0]


def test_targets_are_those_that_were_just_made():
    model = nn.Linear(4, 4)
    data_set = [torch.randn(8, 4) for _ in range(9)]
    gc.collect()
    x, y, labels = torch.randn(8, 4), torch.randn(8, 4), {"labels": torch.randn(8, 1)}
    rows, other, output = torch.randn(800, 4)[8:16], torch.randn(9, 4), model(x)

    found = likely_target_bytes(model, ((x,), {}), x.device)

    assert found == y.nbytes + labels["labels"].nbytes + rows.nbytes
    assert len(data_set) == other.shape[0] == 9 and output.requires_grad


def test_parts_of_what_was_written_since_have_no_graph_to_ask_for():
    base = torch.randn(8, 4, requires_grad=True) * 2
    part, _ = base.split(4)
    base.mul_(2)
    with pytest.raises(RuntimeError, match="multiple views"):
        _ = part.grad_fn
    model, x = nn.Linear(4, 4), torch.randn(4, 4)

    found = likely_target_bytes(model, x, x.device)
    del base, part, _
    assert found == likely_target_bytes(model, x, x.device)
