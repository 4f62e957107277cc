"""Ops of a plan with nothing to be done run without Python, and nothing else is different."""

import gc
import threading
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from support.training_steps import build_for_drops, differing, outcome, plain
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide import pytorch_internals
from lowtide.device import planned_ops
from lowtide.tape.followed_ops import FollowedOps
from lowtide.tape.planned_bytes import PlannedBytes
from lowtide.tape.program import program_of
from lowtide.tape.tape import Tape

pytestmark = pytest.mark.usefixtures("one_thread", "planned_ops_are_there")


class Block(nn.Module):
    """A dozen ops, some of which a plan drops; ``swapped`` runs the first two, which it keeps, the other way round."""

    def __init__(self, width=16):
        super().__init__()
        self.linear, self.swapped = nn.Linear(width, width), False

    def forward(self, x):
        y = self.linear(x)
        y = y.mT.unsqueeze(0) if self.swapped else y.unsqueeze(0).mT
        y = y.sin()
        for _ in range(3):
            y = y + 1.0
        y = y[0].mT
        return torch.cat([y.tanh(), y], 1)[:, : x.shape[1]].square()


@pytest.fixture
def seen(monkeypatch):
    """Operators that the tape's Python has seen, by name."""
    found: Counter[str] = Counter()
    before = Tape.__torch_dispatch__

    def look(self, func, types, args=(), kwargs=None):
        found[str(func)] += 1
        return before(self, func, types, args, kwargs)

    monkeypatch.setattr(Tape, "__torch_dispatch__", look)
    return found


def model_and_plan(width=16):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(width) for _ in range(3))), torch.randn(8, width)
    plan = build_for_drops(lowtide.trace(model, x), lambda path: path == "1")
    assert plan.counts["recompute"]
    return model, x, plan


def step(model, x, plan, around=None):
    torch.manual_seed(7)
    with lowtide.apply(model, plan):
        if around is None:
            loss = model(x).square().mean()
        else:
            with around:
                loss = model(x).square().mean()
    loss.backward()
    return outcome(model, loss)


def without_followed_ops(monkeypatch):
    monkeypatch.setattr(planned_ops, "is_there", lambda: False)


def test_python_sees_only_ops_with_something_to_be_done(seen, monkeypatch):
    model, x, plan = model_and_plan()
    expected = plain(model, x)
    acting = [op for call in program_of(plan).calls for op in call.ops if op.acts]

    assert differing(expected, step(model, x, plan)) == []
    assert seen.total() == len(acting)

    seen.clear()
    model.zero_grad()
    without_followed_ops(monkeypatch)
    assert differing(expected, step(model, x, plan)) == []
    assert seen.total() > len(acting)


@pytest.mark.parametrize("where", ["0", "1", "2"])
def test_other_ops_than_planned_are_counted_as_without(where, monkeypatch):
    model, x, plan = model_and_plan()
    model[int(where)].swapped = True
    expected, counts = plain(model, x), []
    for ours in (True, False):
        if not ours:
            without_followed_ops(monkeypatch)
        with lowtide.apply(model, plan) as applied:
            loss = model(x).square().mean()
        loss.backward()
        assert differing(expected, outcome(model, loss)) == []
        counts.append(applied.counts)
        model.zero_grad()

    assert counts[0] == counts[1] and (counts[0].mismatched > 0) == (where == "1")


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("place", ["above", "below"])
def test_a_mode_of_the_users_sees_each_op_once(place):
    """Below ours it would see none that ran without Python."""
    model, x, plan = model_and_plan()
    with Counting() as alone:
        model(x).square().mean()
    mode = Counting()
    if place == "above":
        expected = plain(model, x)
        assert differing(expected, step(model, x, plan, around=mode)) == []
    else:
        with mode, lowtide.apply(model, plan):
            model(x).square().mean()
    names = ("aten.sin.default", "aten.tanh.default", "aten.cat.default", "aten.unsqueeze.default")

    assert all(alone.found.values())
    assert {name: mode.found[name] for name in names} == {name: alone.found[name] for name in names}


def test_an_op_on_a_subclass_is_pythons(seen):
    model, x, plan = model_and_plan()
    hook = model[1].linear.register_forward_hook(lambda module, args, out: TwoTensor(out.detach(), out.detach()))
    with lowtide.apply(model, plan):
        model(x)
    hook.remove()

    assert seen["aten.unsqueeze.default"] > 0


def test_ops_of_a_backward_are_none_of_the_plan():
    mode, x = Counting(), torch.randn(4, requires_grad=True)
    y = x.sin()  # whose backward multiplies
    call = planned_ops.known_ops([torch.ops.aten.cos.default, torch.ops.aten.mul.Tensor], [0, 0])
    place = planned_ops.position()
    with mode:
        place.mode, place.next, place.live_bytes, place.call = id(mode), 0, None, call
        y.backward(torch.ones(4))
        after_backward = place.next
        x.detach().cos() * 2.0
    place.call = None
    planned_ops.forget(call)

    assert (after_backward, place.next) == (0, 2)
    assert mode.found["aten.cos.default"] == mode.found["aten.mul.Tensor"] == 1


def test_ops_under_a_mode_that_is_not_the_tapes_are_pythons():
    mode, another, x = Counting(), Counting(), torch.randn(4)
    call = planned_ops.known_ops([torch.ops.aten.cos.default], [0])
    place = planned_ops.position()
    for whose in (another, mode):
        with mode:
            place.mode, place.next, place.live_bytes, place.call = id(whose), 0, None, call
            x.cos()
        place.call = None
    planned_ops.forget(call)

    assert mode.found["aten.cos.default"] == 1


class Twice(nn.Module):
    """Calls another model in the middle of its own ops."""

    def __init__(self, inner):
        super().__init__()
        self.block, self.inner = Block(), [inner]

    def forward(self, x):
        y = self.block(x).sin()
        return self.inner[0](y).cos() + y.exp()


def test_a_plan_inside_another_ones_step_and_back():
    inner, x, plan = model_and_plan()
    outer = Twice(inner)
    outer_plan = build_for_drops(lowtide.trace(outer, x), lambda path: path in ("", "block"))

    def trained(call):
        outer.inner[0] = call
        with lowtide.apply(outer, outer_plan) if call is not inner else nullcontext() as applied:
            loss = outer(x).square().mean()
        loss.backward()
        found = [loss.detach(), *(p.grad for p in (*outer.parameters(), *inner.parameters()))]
        outer.zero_grad(), inner.zero_grad()
        return found, applied

    def within(y):
        with lowtide.apply(inner, plan):
            return inner(y)

    expected, _ = trained(inner)
    found, applied = trained(within)

    assert all(map(torch.equal, expected, found))
    assert applied.counts.dropped > 0


@pytest.mark.parametrize("leaves", [True, False])
def test_another_tape_takes_its_place_and_the_first_one_knows_how_far_it_had_got(leaves, monkeypatch):
    """Else it would go on at the other one's op."""
    plan = model_and_plan()[2]
    modes = object(), object()
    first, second = (FollowedOps(mode) for mode in modes)
    if not leaves:
        monkeypatch.setattr(FollowedOps, "end", lambda self: None)
    call, other = Open(), Open()
    planned = next(call for call in program_of(plan).calls if len(call.ops) > 4)
    first.start_here(program_of(plan), None)
    first.begin(call, planned)
    planned_ops.position().next = 3
    second.start_here(program_of(plan), None)
    second.begin(other, planned)
    planned_ops.position().next = 1
    first.catch_up()

    assert call.next == (3 if leaves else 1) and first.is_on is not leaves
    monkeypatch.undo()


class Open:
    next = 0


def test_a_tape_that_goes_leaves_nothing_behind():
    mode = object()
    followed = FollowedOps(mode)
    program = program_of(model_and_plan()[2])
    planned = next(call for call in program.calls if len(call.ops) > 4)
    followed.start_here(program, None)
    followed.begin(Open(), planned)
    place = planned_ops.position()
    assert place.call
    del followed
    gc.collect()

    assert not place.call


def test_what_belonged_to_a_thread_may_be_written_when_that_has_ended():
    found = []
    thread = threading.Thread(target=lambda: found.append(planned_ops.position()))
    thread.start()
    thread.join()
    found[0].next = 7

    assert found[0].next == 7 and planned_ops.position().next != 7


def test_where_more_lives_than_planned_ops_are_pythons(seen, monkeypatch):
    """It looks then whether the step still keeps its budget."""
    model, x = model_and_plan(width=64)[0], torch.randn(4096, 64)
    with lowtide.fit(model, budget="80%") as fit:
        for _ in range(4):
            model(x).square().mean().backward()
            fit.wait()
        assert fit.status().in_force
        seen.clear()
        model(x).square().mean().backward()
        few = seen.total()
        monkeypatch.setattr(PlannedBytes, "allowance_bytes", property(lambda self: -(1 << 40)))
        seen.clear()
        model(x).square().mean().backward()

        assert 0 < few < seen.total() and fit.status().in_force


def test_without_the_library_the_plan_runs_and_status_says_what_is_missing(monkeypatch):
    without_followed_ops(monkeypatch)
    monkeypatch.setattr(planned_ops.NATIVE, "why_missing", "there is no C++ compiler")
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(64) for _ in range(3))), torch.randn(4096, 64)
    with lowtide.fit(model, budget="80%") as fit:
        for _ in range(4):
            model(x).square().mean().backward()
            fit.wait()
        status = fit.status()

    assert status.in_force
    assert [line for line in status.reasons if "15 us each: there is no C++ compiler" in line]


def test_on_a_pytorch_that_nobody_has_checked_each_op_is_pythons(monkeypatch):
    for name, value in (("loaded", None), ("why_missing", "")):
        monkeypatch.setattr(planned_ops.NATIVE, name, value)
    monkeypatch.setattr(pytorch_internals, "VERSION", "2.99.0")
    planned_ops.prepare(waits=True)

    assert not planned_ops.is_there() and "PyTorch 2.99.0 was not checked" in planned_ops.why_missing()
