"""Guards around what a proof of a call is remembered by: numbers it is given, global flags, and a few of each.

Each kernel here gives the same bits again one way and not the other. The proof of one way is made first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.function_cases import Counts, Scales, between, restart
from support.training_steps import differing, drop_everything, harshest, outcome
from torch import nn

import lowtide
from lowtide.device.numeric_flags import numeric_flags
from lowtide.plan import RECOMPUTE
from lowtide.step import function_calls, whole_modules
from lowtide.step.kinds_of_calls import ANEW, MOST_VALUES
from lowtide.tape.online.online_calls import KnownCalls
from lowtide.tape.program import PlanProgram, program_of
from lowtide.tape.tape import Tape
from lowtide.training import rehearsal

pytestmark = pytest.mark.usefixtures("one_thread")


class Repeats(Scales):
    """Gives the same bits again if it is told a number that is 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: Any) -> torch.Tensor:
        number = way[0] if isinstance(way, tuple) else way
        return Counts.forward(ctx, x) if number not in (0, "same") else Scales.forward(ctx, x)


class RepeatsUnderFlag(Scales):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (Scales if torch.are_deterministic_algorithms_enabled() else Counts).forward(ctx, x)


def set_flag(net: nn.Module, repeats: bool) -> None:
    torch.use_deterministic_algorithms(repeats)


def sets(good: Any, bad: Any) -> Callable[[nn.Module, bool], None]:
    return lambda net, repeats: setattr(net, "way", good if repeats else bad)


CASES: dict[str, tuple[Any, Callable[[nn.Module, bool], None]]] = {
    "int": (lambda self, x: Repeats.apply(x, self.way), sets(0, 1)),
    "float": (lambda self, x: Repeats.apply(x, self.way), sets(0.0, 0.01)),
    "str": (lambda self, x: Repeats.apply(x, self.way), sets("same", "other")),
    "in a tuple": (lambda self, x: Repeats.apply(x, self.way), sets((0, 2), (1, 2))),
    "flag": (lambda self, x: RepeatsUnderFlag.apply(x), set_flag),
}


@pytest.fixture(autouse=True)
def flags_put_back() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def remember_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs hold for all numbers, and under all flags."""
    for module in (function_calls, whole_modules):
        monkeypatch.setattr(module, "values_of", lambda given: ())
    monkeypatch.setattr(function_calls, "numeric_flags", tuple)


def step(net: nn.Module, x: torch.Tensor, call: Any = None) -> dict[str, torch.Tensor | None]:
    restart()
    net.zero_grad()
    loss = (net(x) if call is None else call(net, x)).square().mean()
    loss.backward()
    return outcome(net, loss)


def harms(model: nn.Module, x: torch.Tensor, put: Any, call: Any = None, fit: Any = None) -> list[str]:
    """What differs from the plain steps, while the kernel repeats its bits or not."""
    bare, found = copy.deepcopy(model), []
    for repeats in (True, True, False, False, True, False):
        outcomes = []
        for net, how in ((bare, None), (model, call)):
            put(net, repeats)
            outcomes.append(step(net, x, how))
        found += differing(*outcomes)
        if fit is not None:
            fit.wait()
    return found


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_plan_proves_each_way_of_a_call(case, guarded, monkeypatch):
    call, put = CASES[case]
    model, x = between(call), torch.randn(8, 8)
    put(model, True)
    plan = harshest(model, x)
    if not guarded:
        remember_less(monkeypatch)
    with lowtide.apply(model, plan):
        assert (harms(model, x, put) == []) is guarded


@pytest.mark.parametrize("with_batch", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_fit_proves_each_way_of_a_call(case, with_batch, monkeypatch):
    call, put = CASES[case]
    model, x = between(call), torch.randn(512, 8)
    put(model, True)
    monkeypatch.setattr(rehearsal, "solve", lambda graph, costs, budget, **options: drop_everything(graph))
    fit = lowtide.fit(model, x if with_batch else None, budget="70%")

    assert harms(model, x, put, fit=fit) == []
    assert [d for d in fit.plan.decisions if d.action == RECOMPUTE]
    assert any("gives other bits when it runs again" in reason for reason in fit.status().reasons)
    fit.remove()


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_checkpointing_proves_each_way_of_a_call(case, guarded, monkeypatch):
    monkeypatch.setattr("lowtide.tape.online.dropping._known_calls", KnownCalls())
    monkeypatch.setattr("lowtide.tape.online.dropping._SEAL_EVERY", 10**9)  # a sealed value would be an error
    call, put = CASES[case]
    if not guarded:
        remember_less(monkeypatch)

    found = harms(between(call), torch.randn(512, 8), put, call=lowtide.checkpoint)

    assert (found == []) is guarded


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.runs = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor, *, mode: int) -> torch.Tensor:
        self.runs += mode
        return (self.up(x) * (1 + 0.1 * self.runs)).sin()


def calls_experts(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.way:
        self.experts.runs = 0  # each step begins anew
    return self.experts(x, mode=self.way)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_named_module_is_proven_for_each_number_that_it_is_given(guarded, monkeypatch):
    model, x = between(calls_experts), torch.randn(8, 8)
    model.experts, put = Experts(), sets(0, 1)
    put(model, True)
    plan = drop_everything(lowtide.trace(model, x, opaque=["experts"]))
    if not guarded:
        remember_less(monkeypatch)

    def began_anew(net: nn.Module, repeats: bool) -> None:
        put(net, repeats)
        net.experts.runs = 0

    with lowtide.apply(model, plan):
        assert (harms(model, x, began_anew) == []) is guarded


# -- numbers that count up ---------------------------------------------------------------------------------------------


class TakesStep(Scales):
    runs: list[int]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        TakesStep.runs.append(number)
        return Scales.forward(ctx, x)


def counts_up(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.steps += 1
    return TakesStep.apply(x, self.steps)


def test_a_number_that_counts_up_is_proven_in_each_step_and_told(monkeypatch):
    TakesStep.runs = []
    model, x = between(counts_up), torch.randn(8, 8)
    model.steps = 0
    monkeypatch.setattr(rehearsal, "solve", lambda graph, costs, budget, **options: drop_everything(graph))
    bare, fit = copy.deepcopy(model), lowtide.fit(model, x, budget="100%")
    program, bare.steps = program_of(fit.plan), model.steps
    for _ in range(3 * MOST_VALUES):
        TakesStep.runs.clear()
        found = [step(net, x) for net in (bare, model)]
        assert differing(*found) == []
        assert len(TakesStep.runs) == 1 + 3  # plain; forward, proof and replay

    (op,) = [op for op in program.ops if op.name.startswith("function.")]
    ((_, verdicts),) = op.calls._verdicts.items()
    assert len(verdicts) == MOST_VALUES
    assert [reason for reason in fit.status().reasons if reason.startswith(op.name) and ANEW in reason]
    fit.remove()


def test_numbers_that_come_back_are_proven_once():
    TakesStep.runs = []
    model, x = between(counts_up), torch.randn(8, 8)
    model.steps = 0
    plan = harshest(model, x)
    with lowtide.apply(model, plan):
        for proven in (False, True):
            model.steps = 10
            for _ in range(MOST_VALUES):
                TakesStep.runs.clear()
                step(model, x)
                assert len(TakesStep.runs) == (2 if proven else 3)


# -- operators that PyTorch sees ---------------------------------------------------------------------------------------


def test_what_is_proven_of_operators_holds_under_its_flags():
    model, x = between(lambda self, x: x.cos()), torch.randn(8, 8)
    program = PlanProgram(harshest(model, x))
    now, other = numeric_flags(), (99, *numeric_flags()[1:])
    program.note_proven(now, [1, 2])
    program.note_proven(other, [3])

    seen = []
    for flags in (now, other, ("never",), now):
        program.run_under(flags)
        seen.append(program.proven_ops)

    assert seen == [{1, 2}, {3}, set(), {1, 2}]


def test_a_step_under_other_flags_proves_its_operators_anew(monkeypatch):
    model, x = between(lambda self, x: x.cos()), torch.randn(8, 8)
    monkeypatch.setattr(rehearsal, "solve", lambda graph, costs, budget, **options: drop_everything(graph))
    fit = lowtide.fit(model, x, budget="100%")
    step(model, x)
    seen: list[bool] = []
    is_to_be_proven = Tape._is_to_be_proven

    def looks(self: Tape, op: Any) -> bool:
        seen.append(op.proven)
        return is_to_be_proven(self, op)

    monkeypatch.setattr(Tape, "_is_to_be_proven", looks)
    for repeats, known in ((False, True), (True, False), (True, True), (False, True)):
        torch.use_deterministic_algorithms(repeats)
        seen.clear()
        step(model, x)
        assert seen and set(seen) == {known}
    fit.remove()
