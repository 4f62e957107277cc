"""Operators of other libraries in steps without a plan: made again, or kept by name where their schema is wrong."""

import pytest
import torch
from support.online_steps import online, recorded
from support.training_steps import differing, plain
from support.unseen_memory import memory_of
from torch import nn

from lowtide.step.kinds_of_calls import KnownKinds
from lowtide.tape.online.foreign_ops import ForeignOp
from lowtide.tape.online.online_calls import KnownCalls
from lowtide.tape.online.online_tape import OnlineTape

pytestmark = pytest.mark.usefixtures("one_thread")


def _registered(name, forward):
    """``lowtide_foreign::name``, whose schema says that it writes nothing; its gradient is that of ``2 * x``."""
    op = torch.library.custom_op(f"lowtide_foreign::{name}", mutates_args=())(forward)
    op.register_autograd(lambda ctx, grad: 2 * grad)
    return op


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _write(x: torch.Tensor) -> torch.Tensor:
    doubled = x * 2
    memory_of(x)[...] += 1  # no version says so
    return doubled


def _draw(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + torch.rand(())


OPERATORS = {name: _registered(name, run) for name, run in (("double", _double), ("write", _write), ("draw", _draw))}


class Layers(nn.Module):
    def __init__(self, op):
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])
        self.name = op

    def forward(self, x):
        op = OPERATORS[self.name]  # which cannot be copied with the model
        for linear in self.linears:
            hidden = torch.tanh(linear(x))
            aside = hidden.exp().sin()  # what ``exp`` makes is let go before the operator writes what it is made of
            x = op(hidden).sigmoid() + x + aside
        return x.square().mean()


@pytest.mark.parametrize("make", [OnlineTape, recorded])
def test_what_operators_of_others_made_is_made_again(make):
    """As of a quantised layer: else what comes after it stays, too."""
    model, x = Layers("double"), torch.randn(512, 16)
    expected = plain(model, x)
    _, free = online(model, x, float("inf"), make=make)

    found, tape = online(model, x, 0.4 * free.live.peak, make=make)

    assert differing(expected, found) == []
    assert tape.live.peak <= 0.4 * free.live.peak
    assert not tape.problem


@pytest.mark.parametrize("op, steps", [("write", 1), ("write", 2), ("draw", 1)])
def test_what_an_operator_does_unsaid_is_seen_and_what_it_made_stays(op, steps):
    model, x = Layers(op), torch.randn(512, 16)
    expected = plain(model, x.clone())
    known = KnownCalls()
    for _ in range(steps):
        found, tape = online(model, x.clone(), 1, make=lambda model, budget: OnlineTape(model, budget, None, known))

        assert differing(expected, found) == []
        assert not tape.problem


@pytest.mark.parametrize("func", [torch.ops.quantized.linear.default, torch.ops._c10d_functional.all_reduce.default])
def test_what_is_given_an_object_or_communicates_stays_without_a_look(func):
    op = ForeignOp(KnownKinds(), func, (torch.zeros(4),), {}, [torch.zeros(4)])

    why, written = op.why_kept()
    assert why and not written and not op.is_watched
