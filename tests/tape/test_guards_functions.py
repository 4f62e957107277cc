"""Guards around autograd Functions whose kernels no dispatcher sees: each call is one op, run again or kept by name.

Each bad input is harmless, and with its guard taken out the harm comes back. Plans here drop every storage that may be
dropped.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from support.function_cases import KEPT, WORKS, Counts, Scales, WritesUnseen, between, drawn, kernel, restart
from support.opaque_functions import OpaqueLlama
from support.training_steps import (
    build_for_drops,
    differing,
    drop_everything,
    harshest,
    is_clean,
    outcome,
    plain,
    planned,
    replays,
)
from support.unseen_memory import memory_of
from torch import nn
from torch.autograd import Function

import lowtide
from lowtide.graph.function_ops import function_groups
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE
from lowtide.recording import opaque_calls
from lowtide.recording.opaque_calls import CallsAsOne
from lowtide.step import function_calls
from lowtide.tape.calls_under_plan import CallUnderPlan
from lowtide.training import rehearsal

pytestmark = pytest.mark.usefixtures("one_thread")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def ops_of(graph: StepGraph) -> list[str]:
    return [op.name.split(".")[1] for op in graph.forward_ops if op.name.startswith("function.")]


def why_kept(model: nn.Module, x: torch.Tensor) -> str:
    (group,) = function_groups(lowtide.trace(model, x))
    return group.why_kept


def harms(model: nn.Module, x: torch.Tensor) -> list[str]:
    """What differs from the plain step under a plan that drops everything."""
    return differing(plain(model, x), planned(model, x, harshest(model, x)))


# -- what works --------------------------------------------------------------------------------------------------------


@needs_compiler
def test_a_model_of_opaque_calls_is_recomputed_as_a_whole():
    model, ids = OpaqueLlama(), torch.randint(64, (2, 16))
    plan = harshest(model, ids)
    expected = plain(model, ids)
    with replays() as seen:
        found = planned(model, ids, plan)

    assert differing(expected, found) == []
    assert {r.op.name.split(".")[1] for r in seen} >= {"RMSNorm", "Rotary", "Attention", "SwiGLU", "CrossEntropy"}
    stays = [d for d in plan.decisions if d.stored and d.action != RECOMPUTE]
    assert sum(d.bytes for d in stays) == 4  # the loss itself, which the step reads outside the model
    assert is_clean(model)


def test_the_way_of_calls_is_left_as_it_was():
    # a process of its own: another test may have left a fitted model
    source = """
import torch, lowtide
from torch.autograd.function import Function, _SingleLevelFunction

def ways():
    return Function.__dict__["apply"], _SingleLevelFunction.__dict__.get("apply")

before, inside = ways(), []
class Twice(Function):
    @staticmethod
    def forward(ctx, x):
        inside.append(ways())
        return x * 2
    @staticmethod
    def backward(ctx, g):
        return g * 2

lowtide.checkpoint(Twice.apply, torch.ones(3, requires_grad=True)).sum().backward()
print(inside[0] != before, ways() == before)
"""
    done = subprocess.run([sys.executable, "-c", source], text=True, capture_output=True)
    assert (done.stdout.strip(), done.stderr) == ("True True", "")


@needs_compiler
def test_the_judge_knows_the_peak_of_opaque_calls():
    model, ids = OpaqueLlama(layers=3, width=64, length=64, words=256), torch.randint(256, (2, 64))
    graph = lowtide.trace(model, ids)
    plan = lowtide.solve(graph, lowtide.measure(graph), "40%")

    proof = lowtide.verify(model, ids, plan)

    assert proof.gradients_bitwise_equal
    assert proof.measured_peak_bytes <= proof.predicted_peak_bytes < 1.1 * proof.measured_peak_bytes


@pytest.mark.parametrize("case", WORKS)
def test_a_call_runs_again_bit_for_bit(case):
    model, x = between(WORKS[case]), torch.randn(8, 8)
    graph = lowtide.trace(model, x)

    assert ops_of(graph) and not any(group.why_kept for group in function_groups(graph))
    with replays() as seen:
        assert harms(model, x) == []
    assert any(r.op.name.startswith("function.") for r in seen)


def test_a_random_call_is_wrong_without_its_generator(monkeypatch):
    monkeypatch.setattr(CallUnderPlan, "generators_if_moved", lambda self: None)

    assert harms(between(WORKS["random"]), torch.randn(8, 8))


def test_autocast_of_the_forward_pass_is_part_of_a_call(monkeypatch):
    model, x = between(WORKS["autocast"]), torch.randn(8, 8)
    monkeypatch.setattr(function_calls, "autocast_types", list)

    assert why_kept(model, x) == "gives other bits when it runs again"


def test_a_second_backward_runs_calls_again():
    model, x = between(WORKS["twice"]), torch.randn(8, 8)
    plan = harshest(model, x)
    found = []
    for ours in (copy.deepcopy(model), copy.deepcopy(model)):
        with lowtide.apply(ours, plan) if found else torch.enable_grad():
            loss = ours(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(outcome(ours, loss))

    assert differing(*found) == []


def test_what_operators_say_in_full_stays_what_it_was():
    class Plain(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return g * ctx.saved_tensors[0].cos()

    graph = lowtide.trace(between(lambda self, x: Plain.apply(x)), torch.randn(8, 8))

    assert ops_of(graph) == []


# -- what is kept, by name ---------------------------------------------------------------------------------------------


class WritesBuffer(Scales):
    buffer: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        memory_of(WritesBuffer.buffer)[:] += 1
        return Scales.forward(ctx, x)


@pytest.mark.parametrize("reason", KEPT)
def test_what_must_not_run_again_is_kept_and_named(reason, monkeypatch):
    torch.manual_seed(0)
    model, x = between(KEPT[reason]), torch.randn(8, 8)
    monkeypatch.setattr(rehearsal, "solve", lambda graph, costs, budget, **options: drop_everything(graph))
    bare = copy.deepcopy(model)
    fit = lowtide.fit(model, x, budget="100%")

    def step(net: nn.Module) -> dict[str, torch.Tensor | None]:
        restart()
        loss = net(x).square().mean()
        loss.backward()
        return outcome(net, loss)

    assert differing(step(bare), step(model)) == []
    numbers = drawn()
    step(bare)
    assert numbers == drawn()
    assert fit.plan.counts[RECOMPUTE]
    (line,) = fit.status().reasons
    assert reason in line and any(size in line for size in ("256 B", "512 B", "768 B"))
    fit.remove()


def test_a_buffer_that_a_call_writes_is_found_and_put_back(monkeypatch):
    model, x = between(lambda self, x: WritesBuffer.apply(x)), torch.randn(8, 8)
    model.register_buffer("count", torch.zeros(()).reshape(1))
    WritesBuffer.buffer = model.count

    assert why_kept(model, x) == "writes a buffer"
    assert model.count.item() == 0


# -- the guards, taken out ---------------------------------------------------------------------------------------------


class Called(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WritesUnseen.apply(x)


def test_an_unseen_write_happens_twice_without_the_look_at_inputs(monkeypatch):
    model, x = between(lambda self, x: self.called(x * 1)), torch.randn(8, 8)
    model.called = Called()
    monkeypatch.setattr(CallsAsOne, "_mark_changed", lambda *_: set())
    monkeypatch.setattr(opaque_calls, "why_not_same", lambda *_: "")
    plan = build_for_drops(lowtide.trace(model, x), lambda path: path == "called")
    expected = plain(model, x)

    monkeypatch.setattr(CallUnderPlan, "is_proven", lambda *_: True)
    monkeypatch.setattr(CallUnderPlan, "writes_inputs", lambda *_: False)
    assert differing(expected, planned(model, x, plan))
    monkeypatch.undo()
    with lowtide.apply(model, plan) as applied:
        model(x)
    assert applied.counts.dropped == 0


@pytest.mark.parametrize("proven", [True, False])
def test_a_call_is_proven_when_it_first_runs_under_a_plan(proven, monkeypatch):
    monkeypatch.setattr(opaque_calls, "why_not_same", lambda *_: "")  # a trace that believes everything
    if not proven:
        monkeypatch.setattr(CallUnderPlan, "is_proven", lambda *_: True)
    model, x = between(KEPT["gives other bits when it runs again"]), torch.randn(8, 8)
    plan = harshest(model, x)
    found = []
    for ours in (copy.deepcopy(model), copy.deepcopy(model)):
        Counts.runs = 0
        with lowtide.apply(ours, plan) if found else torch.enable_grad():
            loss = ours(x).square().mean()
        loss.backward()
        found.append(outcome(ours, loss))

    assert (differing(*found) == []) is proven


class OverwritesUnseen(Scales):
    """Its backward works in the memory of what it stored, past the dispatcher."""

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, sine = ctx.saved_tensors
        made = kernel(lambda g, x, s: g * (s + x * np.cos(x)), g, x, sine)
        memory_of(x)[:] *= 3.0
        return made


class Changes(Scales):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: int) -> torch.Tensor:
        return (Counts if way else Scales).forward(ctx, x)


class PlusOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1.0


@pytest.mark.parametrize("looked_at", [True, False])
def test_a_backward_that_overwrites_unseen_what_it_unpacked_is_found(looked_at, monkeypatch):
    if not looked_at:
        monkeypatch.setattr("lowtide.recording.saved_tensor_hooks.fingerprint", lambda t: ())
        monkeypatch.setattr(opaque_calls, "fingerprint", lambda t: ())
    model, x = between(lambda self, x: self.plus(x).sin() + OverwritesUnseen.apply(x)), torch.randn(8, 8)
    model.plus = PlusOne()
    # The replay of x + 1 reads x when the other backward has run.
    plan = build_for_drops(lowtide.trace(model, x), lambda path: path == "plus")

    if looked_at:
        assert not plan.counts[RECOMPUTE]
    else:
        assert differing(plain(model, x), planned(model, x, plan))


def test_each_kind_of_call_is_proven_for_itself():
    class OnlySmall(Scales):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 8:
                return Counts.forward(ctx, x)
            return Scales.forward(ctx, x)

    model = between(lambda self, x: OnlySmall.apply(x))
    small, large = torch.randn(8, 8), torch.randn(16, 8)
    plan = harshest(model, small)
    assert differing(plain(model, small), planned(model, small, plan)) == []
    found = []
    for ours in (copy.deepcopy(model), copy.deepcopy(model)):
        Counts.runs = 0
        with lowtide.apply(ours, plan) if found else torch.enable_grad():
            loss = ours(large).square().mean()
        loss.backward()
        found.append(outcome(ours, loss))

    assert differing(*found) == []


class StoresLess(Scales):
    """What it stores besides depends on a number that no kind of call tells."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, much: int) -> torch.Tensor:
        sine = kernel(np.sin, x)
        ctx.save_for_backward(x, *[sine, kernel(np.cos, x)][:much])
        return kernel(np.multiply, x, sine)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, *_ = ctx.saved_tensors
        return g * (x.sin() + x * x.cos()), None


def test_a_call_that_stores_less_than_planned_is_saved():
    much = [2]
    model, x = between(lambda self, x: StoresLess.apply(x, much[0])), torch.randn(8, 8)
    plan = harshest(model, x)
    much[0] = 0

    assert differing(plain(model, x), planned(model, x, plan)) == []


# -- what is told, what is watched -------------------------------------------------------------------------------------


def test_an_explanation_names_calls_and_their_share(tmp_path):
    model, x = between(lambda self, x: Scales.apply(x)), torch.randn(8, 8)
    plan = drop_everything(lowtide.trace(model, x))

    plan.save(tmp_path / "plan.json")
    text = str(lowtide.Plan.load(tmp_path / "plan.json").explain())

    assert "made by kernels that no dispatcher sees: " in text
    assert text.endswith("512 B  1 x Scales, 1.0 ms")
    assert plan.opaque_calls() == "opaque calls made 40 % of what is stored; run again: Scales"


def test_a_status_says_which_calls_run_again(monkeypatch):
    model, x = between(lambda self, x: Scales.apply(x) + Changes.apply(x, self.way)), torch.randn(8, 8)
    monkeypatch.setattr(rehearsal, "solve", lambda graph, costs, budget, **options: drop_everything(graph))
    model.way = 0
    fit = lowtide.fit(model, x, budget="100%")
    model(x).sum().backward()
    before = fit.status()
    model.way = 1
    model.zero_grad()
    model(x).sum().backward()

    assert "% of what is stored; run again: Changes, Scales." in str(before)
    assert before.to_dict()["opaque_calls"].endswith("; run again: Changes, Scales")
    assert fit.status().opaque_calls.endswith("; run again: Scales; saved: Changes")
    fit.remove()


def test_a_status_without_such_calls_says_nothing_of_them():
    fit = lowtide.fit(between(lambda self, x: x.sin()), torch.randn(8, 8), budget="100%")

    assert not fit.status().opaque_calls and "paque" not in str(fit.status())
    fit.remove()


def test_watched_steps_see_calls_as_well():
    model = between(lambda self, x: Scales.apply(x))
    bare, x = copy.deepcopy(model), torch.randn(64, 8)
    fit = lowtide.fit(model, budget="70%")
    for _ in range(4):
        for net in (model, bare):
            net.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
        assert differing(outcome(bare, loss), outcome(model, loss)) == []
        fit.wait()

    assert fit.status().in_force
    assert [op.name.split(".")[1] for op in fit.plan.ops if op.name.startswith("function.")] == ["Scales"]
    assert [d for d in fit.plan.decisions if d.action == RECOMPUTE]
    fit.remove()
