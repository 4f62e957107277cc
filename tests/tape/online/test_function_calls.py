"""Calls of Functions whose kernels nobody sees, in steps without a plan: made again whole, or kept by name."""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.function_cases import KEPT, WORKS, Counts, Scales, between, drawn, kernel, restart
from support.online_steps import online, recorded, recording_of
from support.opaque_functions import OpaqueLlama
from support.training_steps import Net, differing, outcome, plain

import lowtide
from lowtide.errors import ReplayError
from lowtide.tape.online import online_calls, release
from lowtide.tape.online.online_calls import CallRecipe, OnlineCall
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.online.writes import Writes

pytestmark = pytest.mark.usefixtures("one_thread")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@contextmanager
def calls_made_again() -> Iterator[list[str]]:
    """The names of those that run again in backward."""
    seen: list[str] = []
    runs = CallRecipe.run

    def run(self: CallRecipe, transient: Any) -> list[torch.Tensor]:
        if torch._C._current_graph_task_id() != -1:
            seen.append(self.name.split(".")[1])
        return runs(self, transient)

    CallRecipe.run = run
    try:
        yield seen
    finally:
        CallRecipe.run = runs


def batch() -> torch.Tensor:
    return torch.randn(512, 8)  # what is smaller than a page is never let go


@needs_compiler
@pytest.mark.parametrize("make", [OnlineTape, recorded])
def test_a_model_of_opaque_calls_keeps_its_budget(make, monkeypatch):
    model, ids = OpaqueLlama(layers=4, width=64, length=64, words=64), torch.randint(64, (4, 64))
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 1)  # their gradients take as much as a layer's activations
    expected = plain(model, ids)
    _, free = online(model, ids, float("inf"), make=make)
    budget = 0.35 * free.live.peak

    with calls_made_again() as again:
        found, tape = online(model, ids, budget, make=make)

    assert differing(expected, found) == []
    assert tape.live.peak <= budget
    assert set(again) >= {"RMSNorm", "Rotary", "Attention", "SwiGLU"}
    assert not (tape.known_calls.kept or tape.problem or tape.releaser.differed)

    monkeypatch.setattr(OnlineTape, "observed_call", lambda self, call: call)
    assert online(model, ids, budget, make=make)[1].live.peak > 1.3 * budget


@pytest.mark.parametrize("case", WORKS)
def test_a_call_is_made_again_bit_for_bit(case):
    model, x = between(WORKS[case]), batch()

    with calls_made_again() as again:
        found, tape = online(model, x, 0)

    assert again
    assert differing(plain(model, x), found) == []
    assert not (tape.known_calls.kept or tape.problem)


@pytest.mark.parametrize("reason", KEPT)
def test_what_must_not_run_again_is_kept_and_named(reason):
    model, x = between(KEPT[reason]), batch()
    restart()
    expected = plain(model, x)
    numbers = drawn()
    restart()

    found, tape = online(model, x, 0)

    assert differing(expected, found) == []
    assert numbers == drawn()
    assert not tape.problem
    if "attributes of its context" not in reason:  # there what is stored besides may go
        assert reason in tape.known_calls.kept.values()


def test_the_plan_of_a_watched_step_knows_what_is_kept():
    model, x = between(KEPT["gives other bits when it runs again"]), batch()
    fit = lowtide.fit(model, budget="90%")
    model(x).square().mean().backward()
    fit.wait()

    assert any("Counts gives other bits when it runs again" in reason for reason in fit.status().reasons)
    fit.remove()


def test_a_kind_of_call_runs_twice_only_once():
    known = online_calls.KnownCalls()
    runs = []

    class Tells(Scales):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return Scales.forward(ctx, x)

    model, x = between(lambda self, x: Tells.apply(x) + Tells.apply(x.cos())), batch()
    for _ in range(2):
        online(model, x, float("inf"), make=lambda m, b: OnlineTape(m, b, known_calls=known))

    assert len(runs) == 2 * 2 + 1


def test_operators_that_say_all_stay_what_they_were():
    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return g * ctx.saved_tensors[0].cos()

    model, x = between(lambda self, x: Plain.apply(x)), batch()
    with calls_made_again() as again:
        found, tape = online(model, x, 0)

    assert differing(plain(model, x), found) == []
    assert tape.releaser.num_released and not again


def test_tensors_that_are_gone_say_nothing_of_those_at_their_addresses():
    class Sums(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            total = x.sin()
            for n in range(1, 8):
                total = total + (x * n).cos()
            ctx.save_for_backward(x)
            return total

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return g * (x.cos() - sum(n * (x * n).sin() for n in range(1, 8)))

    model, x = between(lambda self, x: Sums.apply(x)), batch()
    with calls_made_again() as again:
        _, tape = online(model, x, 0)

    assert tape.releaser.num_released and not again


def test_watching_a_call_adds_no_op_to_the_step():
    model = between(lambda self, x: Scales.apply(x, self.layers[0].weight))
    _, watch = online(model, batch(), float("inf"), make=recorded)

    names = [op.name for op in recording_of(watch).recorder.builder.ops if not op.backward]
    assert any("Scales" in name for name in names)
    assert not [name for name in names if name.startswith("aten.detach")]


# -- guards, each with what happens without it -------------------------------------------------------------------------


def test_a_random_call_without_its_generator_is_never_let_go(monkeypatch):
    model, x = between(WORKS["random"]), batch()
    expected = plain(model, x)
    monkeypatch.setattr(online_calls, "why_not_same", lambda *_, **__: "")  # it has no generator in the proof either
    monkeypatch.setattr(online_calls.GeneratorStates, "have_moved", lambda self: False)

    found, tape = online(model, x, 0)

    assert differing(expected, found) == []
    assert any("DropsOut" in name for name in tape.releaser.differed)

    monkeypatch.setattr(release, "same_storage_bits", lambda a, b: True)
    monkeypatch.setattr(release, "sum_of_words", lambda tensor: 0)
    assert differing(expected, online(model, x, 0)[0])


class ScalesItself(Scales):
    """Halves its input in place, unseen, and stores what it has made of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.detach().numpy()[:] *= 0.5
        return Scales.forward(ctx, x)


def halves_kept_memory(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = x * 1
    read = h + 1
    h.mul_(1.0)  # what has been read and is written then is never made again
    y = (h.sin().exp() * 2).cos() * 2  # what exp has made is let go by the time of the call
    return ScalesItself.apply(h) + y.tanh() + read


@pytest.mark.parametrize("looked_at", [True, False])
def test_a_call_that_writes_its_input_unseen_is_not_run_again(looked_at, monkeypatch):
    model, x = between(halves_kept_memory), batch()
    expected = plain(model, x)
    if not looked_at:
        monkeypatch.setattr(OnlineCall, "_changed_inputs", lambda self: [])
        monkeypatch.setattr(online_calls, "why_not_same", lambda *_, **__: "")
        monkeypatch.setattr(release, "same_storage_bits", lambda a, b: True)
        monkeypatch.setattr(release, "sum_of_words", lambda tensor: 0)

    found, tape = online(model, x, 0)

    assert (differing(expected, found) == []) is looked_at
    assert bool(tape.known_calls.kept) is looked_at


@pytest.mark.parametrize("remade", [True, False])
def test_what_was_made_from_an_input_is_made_again_before_a_call_writes_that(remade, monkeypatch):
    model, x = between(halves_kept_memory), batch()
    if not remade:
        monkeypatch.setattr(Writes, "keep_what_reads", lambda self, targets: None)
        with pytest.raises(ReplayError):
            online(model, x, 0)
    else:
        assert differing(plain(model, x), online(model, x, 0)[0]) == []


class KeepsTable(torch.autograd.Function):
    """Stores a table that it has made for an earlier call, and that somebody changes."""

    table: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(KeepsTable.table.detach())
        return kernel(lambda x, t: x * t, x, KeepsTable.table)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * ctx.saved_tensors[0]


@pytest.mark.parametrize("guarded", [True, False])
def test_a_table_that_a_function_keeps_is_no_result_of_a_run(guarded, monkeypatch):
    KeepsTable.table = torch.rand(64, 64)
    x = torch.randn(64, 64, requires_grad=True)
    known = online_calls.KnownCalls()
    monkeypatch.setattr("lowtide.tape.online.dropping._known_calls", known)
    monkeypatch.setattr("lowtide.tape.online.dropping._claims", itertools.count(1))  # else it may be sealed
    if not guarded:
        same = online_calls.why_not_same
        monkeypatch.setattr(online_calls, "why_not_same", lambda *a, own_memory: same(*a))

    out = lowtide.checkpoint(KeepsTable.apply, x)
    KeepsTable.table.data = torch.zeros(64, 64)  # other memory: autograd's is as it was
    out.sum().backward()

    assert bool(x.grad.any()) is guarded
    assert list(known.kept.values()) == ["keeps tensors that it made elsewhere"] * guarded


# -- lowtide.checkpoint ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", WORKS)
def test_a_checkpointed_call_drops_what_opaque_kernels_made(case):
    model, x = between(WORKS[case]), batch()
    bare = copy.deepcopy(model)
    found = []
    with calls_made_again() as again:
        for net in (bare, model):
            torch.manual_seed(3)
            out = lowtide.checkpoint(net, x) if found else net(x)
            loss = out.square().mean()
            loss.backward()
            found.append(outcome(net, loss))

    assert differing(*found) == []
    assert again


def test_a_checkpointed_call_keeps_what_must_not_run_again():
    model, x = between(lambda self, x: Counts.apply(x)), batch()
    found = []
    for net in (copy.deepcopy(model), model):
        restart()
        loss = (lowtide.checkpoint(net, x) if found else net(x)).square().mean()
        loss.backward()
        found.append(outcome(net, loss))

    assert differing(*found) == []


def test_a_second_backward_makes_calls_again():
    model, x = between(WORKS["twice"]), batch()
    found = []
    for net in (copy.deepcopy(model), copy.deepcopy(model)):
        out = lowtide.checkpoint(net, x) if found else net(x)
        loss = out.square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(outcome(net, loss))

    assert differing(*found) == []
