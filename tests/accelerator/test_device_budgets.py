"""The budget of a watched fit on the accelerator holds from the first step on: kept workspaces, reserved memory."""

import time

import pytest
import torch
from support.training_steps import differing, mlp, outcome, plain
from torch import nn

import lowtide
from accelerator.schedules import LATE
from lowtide.tracing.tracer import run_step
from lowtide.training.budget import KeptWorkspaces

MIB = 2**20
NO_HOST = lowtide.Offload(host_budget=None)
BLOCK = 512  # the gradient of the loss, which backward is given


@pytest.fixture(autouse=True)
def nothing_cached(device):
    torch.accelerator.empty_cache()


def peaks_of_steps(fit, model, batch, count=3):
    """Most bytes allocated in each of some steps, and in the end what the last one computed."""
    peaks = []
    for _ in range(count):
        model.zero_grad()
        torch.accelerator.reset_peak_memory_stats()
        loss = run_step(model, batch, None)[0]
        loss.backward()
        peaks.append(torch.accelerator.max_memory_allocated())
        fit.wait()
    return peaks, outcome(model, loss)


def test_a_workspace_that_stays_is_in_the_budget_of_every_watched_step(device):
    model, batch = mlp(4, 64).to("standin"), torch.randn(4096, 64, device="standin")
    expected = plain(model, batch)
    lowtide.trace(model, batch)  # the first look at each kernel takes up to 1 MiB on a device
    budget = torch.accelerator.memory_allocated() + (8 + 6) * MIB
    with device.workspaces(kept_bytes=8 * MIB), device.schedule(LATE, LATE), device.expandable_segments(True):
        with lowtide.fit(model, budget=budget, offload=NO_HOST) as fit:
            peaks, found = peaks_of_steps(fit, model, batch)
            assert max(peaks) <= budget + BLOCK and fit.status().reasons == ()
            assert fit.graph.resident["other"] >= 8 * MIB and fit.status().planned_steps == 2
    assert differing(expected, found) == []


def test_a_workspace_that_is_taken_in_the_step_is_in_no_plan(device, monkeypatch):
    """The guard taken out: steps go over the budget, and nothing says so."""
    monkeypatch.setattr(KeptWorkspaces, "take", lambda self, device: None)
    model, batch = mlp(4, 64).to("standin"), torch.randn(4096, 64, device="standin")
    lowtide.trace(model, batch)
    budget = torch.accelerator.memory_allocated() + (8 + 6) * MIB
    with device.workspaces(kept_bytes=8 * MIB), device.expandable_segments(True):
        with lowtide.fit(model, budget=budget, offload=NO_HOST) as fit:
            peaks, _ = peaks_of_steps(fit, model, batch)
    assert max(peaks) > budget + 2 * MIB


def test_a_workspace_of_one_op_is_in_the_budget_of_the_steps_after_the_watched_one(device):
    """How much a kernel takes, nobody knows before it has run."""
    layers = [m for _ in range(4) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 256, 10)).to("standin")
    batch = torch.randn(64, 8, 16, 16, device="standin")
    taken = {"aten::convolution_overrideable": 3 * MIB, "aten::convolution_backward_overrideable": 5 * MIB}
    with device.workspaces(bytes_by_op=taken), device.expandable_segments(True):
        expected = plain(model, batch)
        lowtide.trace(model, batch)
        model.zero_grad()
        budget = torch.accelerator.memory_allocated() + 7 * MIB
        with lowtide.fit(model, budget=budget, offload=NO_HOST) as fit:
            peaks, found = peaks_of_steps(fit, model, batch)
            assert fit.status().planned_steps == 2
    assert max(peaks[1:]) <= budget < peaks[0]
    assert differing(expected, found) == []


def allocated_in_the_end(expected):
    """What is allocated, once the device's thread has let go of the last objects of a backward, 2 ms later at most."""
    for _ in range(200):
        if torch.accelerator.memory_allocated() == expected:
            break
        time.sleep(0.005)
    return torch.accelerator.memory_allocated()


def test_workspaces_are_taken_once_for_each_stream(device):
    kept = KeptWorkspaces()
    before = torch.accelerator.memory_allocated()
    with device.workspaces(kept_bytes=MIB):
        for _ in range(2):
            kept.take(torch.device("standin:0"))
            assert allocated_in_the_end(before + MIB) == before + MIB
        with torch.Stream("standin:0"):
            kept.take(torch.device("standin:0"))
        assert allocated_in_the_end(before + 2 * MIB) == before + 2 * MIB


def reserving():
    """A model whose tensors fill few segments, and its batch."""
    layers = [m for _ in range(4) for m in (nn.Linear(16, 1200), nn.ReLU(), nn.Linear(1200, 16))]
    model, batch = nn.Sequential(*layers).to("standin"), torch.randn(2000, 16, device="standin")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model, batch


def reserved_peaks_of_steps(fit, model, batch, count):
    peaks = []
    for _ in range(count):
        torch.accelerator.reset_peak_memory_stats()
        run_step(model, batch, None)[0].backward()
        peaks.append(torch.accelerator.max_memory_reserved())
        fit.wait()
    return peaks


def fitted_for_reserved(model, budget):
    return lowtide.fit(model, budget=budget, budget_kind="reserved", method="knapsack", offload=NO_HOST)


def test_a_budget_of_reserved_bytes_holds_in_the_step_without_a_plan(device):
    model, batch = reserving()
    with fitted_for_reserved(model, 60 * MIB) as fit:
        first, _, planned = reserved_peaks_of_steps(fit, model, batch, 3)
        told = [r for r in fit.status().reasons if "more" in r]
        predicted = fit.plan.predicted_reserved_peak_bytes
    assert first <= 60 * MIB and told == []
    assert planned <= predicted <= 60 * MIB


def test_a_step_without_a_plan_that_reserves_more_than_the_budget_is_told_and_its_segments_go(device, monkeypatch):
    monkeypatch.setattr("lowtide.training.budget.bytes_for_segments", lambda room: 0)
    model, batch = reserving()
    with fitted_for_reserved(model, 60 * MIB) as fit:
        first, _, planned = reserved_peaks_of_steps(fit, model, batch, 3)
        reasons = fit.status().reasons
        predicted = fit.plan.predicted_reserved_peak_bytes
    assert first > 60 * MIB
    assert [r for r in reasons if r.startswith("a step that ran online had up to 4.00 MiB more reserved than the")]
    assert planned <= predicted <= 60 * MIB


def test_a_budget_of_allocated_bytes_leaves_what_is_cached(device, monkeypatch):
    emptied = []
    monkeypatch.setattr("lowtide.training.reserved_memory.release_cached_memory", lambda: emptied.append(1))
    model, batch = reserving()
    with lowtide.fit(model, budget=60 * MIB, offload=NO_HOST) as fit:
        reserved_peaks_of_steps(fit, model, batch, 2)
    assert not emptied
