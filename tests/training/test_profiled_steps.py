"""Steps while a user's profiler is active: what kernels take beside what they make cannot be measured in them."""

import pytest
import torch
from support.watched_training import resident_bytes
from torch import nn

import lowtide
from lowtide.device import allocation_counter
from lowtide.errors import LowtideError
from lowtide.measurement import allocator
from lowtide.measurement.allocator import peak_bytes
from lowtide.recording.recorder import Recorder

pytestmark = pytest.mark.usefixtures("one_thread")
X = torch.randn(1, 8, 16, 16, 16, generator=torch.Generator(torch.get_default_device()).manual_seed(0))


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(8) for part in (nn.Conv3d(8, 8, 3, padding=1), nn.Tanh())))


def a_profiler_is_active(patch: pytest.MonkeyPatch) -> None:
    """As PyTorch says it. A real one inside of many tests in one process has crashed."""
    patch.setattr(allocator._autograd, "_profiler_enabled", lambda: True)
    patch.setattr(allocation_counter, "count", lambda device="cpu": None)


def profiled(model: nn.Module, fit: lowtide.Fit) -> None:
    with pytest.MonkeyPatch.context() as patch:
        a_profiler_is_active(patch)
        for _ in range(3):
            model.zero_grad()
            model(X).square().mean().backward()
            fit.wait()


def test_a_step_without_a_profiler_is_planned_and_takes_what_is_predicted():
    model = convolutions()
    resident = resident_bytes(model) + X.nbytes
    with lowtide.fit(model, budget="1GiB") as fit:
        profiled(model, fit)
        assert fit.status().planned_steps == 0 and fit.status().plans == 0
        assert any("a profiler was active" in reason for reason in fit.status().reasons)
        for _ in range(2):
            model.zero_grad()
            peak = peak_bytes(lambda: model(X).square().mean().backward())
            fit.wait()
        assert fit.status().in_force and fit.plan.predicted_peak_bytes == resident + peak
        assert any(op.workspace_bytes for op in fit.graph.ops)


def test_without_the_guard_workspaces_would_be_zero(monkeypatch):
    monkeypatch.setattr(Recorder, "profiled", property(lambda self: False, lambda self, value: None), raising=False)
    model = convolutions()
    with lowtide.fit(model, budget="1GiB") as fit:
        profiled(model, fit)
        assert fit.status().in_force and not any(op.workspace_bytes for op in fit.graph.ops)


def test_a_rehearsal_under_a_profiler_is_refused(monkeypatch):
    a_profiler_is_active(monkeypatch)
    with pytest.raises(LowtideError, match="a profiler is active"):
        lowtide.trace(convolutions(), X)
