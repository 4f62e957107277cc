"""Memory of opaque calls that goes away: to disk, by a backward that frees it, or with an error of the launch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from support.function_cases import Scales, between
from support.offloads import flip_a_bit, movable, moving
from support.training_steps import differing, harshest, is_clean, outcome, plain, planned
from support.unseen_memory import memory_at
from torch.autograd import Function

import lowtide
from lowtide.errors import StepError, TierError
from lowtide.graph.function_ops import function_groups
from lowtide.measurement.allocator import peak_bytes
from lowtide.plan import DISK_OFFLOAD
from lowtide.recording import opaque_calls

pytestmark = pytest.mark.usefixtures("one_thread")


# -- on disk -----------------------------------------------------------------------------------------------------------


def test_what_a_call_stores_travels_to_disk_and_back(monkeypatch):
    model, x = between(lambda self, x: Scales.apply(Scales.apply(x).cos())), torch.randn(64, 8)
    graph = lowtide.trace(model, x)
    calls = {op.id for op in graph.forward_ops if op.name.startswith("function.")}
    of_calls = [s for s in movable(graph) if graph.storages[s].op in calls]
    plan = moving(graph, of_calls, action=DISK_OFFLOAD)
    expected = plain(model, x)

    def step() -> torch.Tensor:
        model.zero_grad()
        with lowtide.apply(model, plan, offload=lowtide.Offload(checksums=True)) as applied:
            loss = model(x).square().mean()
        assert len(of_calls) == applied.counts.moved >= 3 and applied.counts.mismatched == 0
        loss.backward()
        return loss

    assert differing(expected, outcome(model, step())) == []
    assert is_clean(model)
    flip_a_bit(monkeypatch)  # what backward reads has come from there
    with pytest.raises(TierError, match="checksum"):
        step()


# -- freed by backward -------------------------------------------------------------------------------------------------


class Frees(Function):
    """Its backward frees the sine that it stored, as kernels do that are short of memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        sine, made = torch.empty(x.shape), torch.empty(x.shape)
        memory_at(sine)[:] = np.sin(memory_at(x))
        memory_at(made)[:] = memory_at(x) * memory_at(sine)
        ctx.save_for_backward(x, sine)
        return made

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, sine = ctx.saved_tensors
        made = g * (sine + x * x.cos())
        sine.untyped_storage().resize_(0)
        return made


def frees(self: Any, x: torch.Tensor) -> torch.Tensor:
    return Frees.apply(Scales.apply(x))


def test_what_a_backward_frees_is_kept_under_a_plan_and_named():
    model, x = between(frees), torch.randn(512, 8)
    groups = {group.name: group for group in function_groups(lowtide.trace(model, x))}

    assert groups["Frees"].why_kept == "written during the step" and not groups["Scales"].why_kept
    assert groups["Frees"].kept_bytes == x.nbytes
    assert differing(plain(model, x), planned(model, x, harshest(model, x))) == []


def test_what_a_backward_frees_is_not_known_without_the_look_at_it(monkeypatch):
    monkeypatch.setattr("lowtide.recording.saved_tensor_hooks.fingerprint", lambda t: ())
    monkeypatch.setattr(opaque_calls, "fingerprint", lambda t: ())
    groups = {group.name: group for group in function_groups(lowtide.trace(between(frees), torch.randn(512, 8)))}

    assert not groups["Frees"].why_kept


@pytest.mark.parametrize("with_batch", [True, False])
def test_a_fit_trains_with_a_backward_that_frees(with_batch):
    model, x = between(frees), torch.randn(512, 8)
    bare = copy.deepcopy(model)
    fit = lowtide.fit(model, x if with_batch else None, budget="90%")
    for _ in range(4):
        found = []
        for net in (bare, model):
            net.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            found.append(outcome(net, loss))
        assert differing(*found) == []
        fit.wait()

    assert fit.status().in_force
    assert any("Frees written during the step" in reason for reason in fit.status().reasons) is with_batch
    fit.remove()


# -- a launch that fails -----------------------------------------------------------------------------------------------


class NoDriver(Scales):
    """As a Triton kernel where there is no driver. It fails when it is launched, or from a later launch on."""

    works_for = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        NoDriver.works_for -= 1
        if NoDriver.works_for < 0:
            raise RuntimeError("0 active drivers ([]). There should only be one.")
        return Scales.forward(ctx, x)


@pytest.mark.parametrize("how", ["trace", "fit with a batch", "watched fit", "checkpoint"])
def test_a_launch_without_a_driver_is_the_kernels_own_error(how):
    model, x, fit = between(lambda self, x: NoDriver.apply(x)), torch.randn(512, 8), None
    NoDriver.works_for = 0
    with pytest.raises((RuntimeError, StepError), match="0 active drivers"):
        if how == "trace":
            lowtide.trace(model, x)
        elif how == "fit with a batch":
            lowtide.fit(model, x, budget="90%")
        elif how == "watched fit":
            fit = lowtide.fit(model, budget="90%")
            model(x)
        else:
            lowtide.checkpoint(model, x)
    if fit is not None:
        fit.remove()

    assert is_clean(model)


def test_a_launch_that_fails_in_its_proof_keeps_the_call_and_names_the_error():
    model, x = between(lambda self, x: NoDriver.apply(x)), torch.randn(512, 8)
    NoDriver.works_for = 1
    (group,) = function_groups(lowtide.trace(model, x))

    assert group.why_kept == "cannot run again (RuntimeError: 0 active drivers ([]). There should only be one.)"


class _Fails(Scales):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        raise ZeroDivisionError("the kernel's own error")


@pytest.mark.filterwarnings("ignore:Leaked callback handle")  # the engine's way to end a profiler
def test_an_error_of_a_backward_in_a_trace_is_its_own_and_the_next_trace_counts():
    with pytest.raises(ZeroDivisionError, match="the kernel's own error"):
        lowtide.trace(between(lambda self, x: _Fails.apply(x)), torch.randn(8, 8))
    model, x = between(lambda self, x: Scales.apply(x)), torch.randn(64, 8)
    graph = lowtide.trace(model, x)
    costs = lowtide.measure(graph)
    predicted = lowtide.simulate(graph, costs, lowtide.solve(graph, costs, method="none")).peak_bytes
    model(x).square().mean().backward()
    measured = peak_bytes(lambda: model(x).square().mean().backward())
    assert predicted == pytest.approx(graph.resident_bytes + measured, rel=0.05)
