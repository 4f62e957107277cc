"""Ops of a watched step are timed by the device's clock, and nobody waits for it."""

import pytest
import torch
from support.training_steps import mlp

import lowtide
from accelerator.schedules import EARLY, LATE
from lowtide.device import timing
from lowtide.recording import watched_times
from lowtide.training import recorded_steps

MIB = 2**20
NO_HOST = lowtide.Offload(host_budget=None)


@pytest.fixture
def fit(device):
    torch.manual_seed(0)
    model, batch = mlp(4, 64).to("standin"), torch.randn(256, 64, device="standin")
    with device.times(op_ms=1, ms_by_op={"aten::mm": 7, "aten::addmm": 5}):
        with lowtide.fit(model, budget=torch.accelerator.memory_allocated() + 64 * MIB, offload=NO_HOST) as fit:

            def step():
                model(batch).square().mean().backward()
                model.zero_grad()

            yield fit, step


def times_by_op(fit):
    found = {}
    for op, ms in zip(fit.graph.ops, fit.costs.op_ms):
        found.setdefault(op.name, set()).add(round(ms, 3))
    return found


def test_an_op_takes_what_the_device_needs_for_it(fit):
    fit, step = fit
    step()
    fit.wait()
    found = times_by_op(fit)

    assert found["aten.addmm.default"] == {5.0} and found["aten.mm.default"] == {7.0}
    assert found["aten.gelu.default"] == {1.0}
    assert fit.status().reasons == ()


def test_where_the_host_is_the_bound_is_told(fit, monkeypatch):
    monkeypatch.setattr(recorded_steps, "why_of_host", lambda graph, costs, times: "the host is the bound")
    fit, step = fit
    step()
    fit.wait()

    assert fit.status().reasons == ("the host is the bound",)


def test_without_events_the_times_are_of_launches_and_that_is_told(device, fit, monkeypatch):
    monkeypatch.setattr(timing, "_takes_timed_events", lambda device: False)
    fit, step = fit
    step()
    fit.wait()

    assert max(times_by_op(fit)["aten.mm.default"]) != 7.0
    assert "op times are those of launches" in " ".join(fit.status().reasons)


@pytest.mark.parametrize("schedule", [(LATE, EARLY), (LATE, LATE)])
def test_nobody_waits_for_the_times(device, fit, monkeypatch, schedule):
    """A device that lags behind: the plan is asked for when it has caught up, and not before."""
    fit, step = fit
    asked = []
    request = fit._lifecycle.plans_by_shape.request
    monkeypatch.setattr(fit._lifecycle.plans_by_shape, "request", lambda *args: asked.append(args) or request(*args))
    monkeypatch.setattr(watched_times.WatchedTimes, "are_known", lambda self: False)
    with device.schedule(*schedule):
        step()
        step()
        assert fit.status().steps == 2 and not asked  # and the second one was not recorded again
        monkeypatch.undo()
        monkeypatch.setattr(
            fit._lifecycle.plans_by_shape, "request", lambda *args: asked.append(args) or request(*args)
        )
        torch.accelerator.synchronize()
        step()
        assert len(asked) == 1
        fit.wait()
    assert len(asked) == 1 and times_by_op(fit)["aten.mm.default"] == {7.0}


def test_reading_is_not_waiting(device):
    spans = timing.Spans("standin")
    values = torch.ones(4, 4, device="standin")
    with device.schedule(LATE, EARLY), device.times(op_ms=3):
        opened = spans.begin()
        values + values
        span = spans.end(opened)
        waited = device.synchronized()
        assert not spans.are_over() and device.synchronized() == waited
        torch.accelerator.synchronize()
        assert spans.are_over() and span.ms() == 3


def test_waiting_for_the_plan_waits_for_the_device(device, fit):
    fit, step = fit
    with device.schedule(LATE, LATE):
        step()
        fit.wait()
    assert times_by_op(fit)["aten.mm.default"] == {7.0}
