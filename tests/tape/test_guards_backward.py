"""Guards around backward: other op sequences, what recipes hold, backward in every form.

Each guard fires, and with each taken out the harm it prevents comes back. Plans here drop every storage that may be
dropped, the setting with the most ways to go wrong.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import signal
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from support.guards import FalseSchema, wrong
from support.quick import thorough_but
from support.training_steps import (
    Net,
    differing,
    drop_everything,
    harshest,
    mlp,
    outcome,
    plain,
    planned,
    replays,
)
from torch import nn

import lowtide
from lowtide import ReplayError
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.tape import recipes, replay, tape, values
from lowtide.tape.program import TapedOp, program_of
from lowtide.training import rehearsal

pytestmark = pytest.mark.usefixtures("one_thread")


# -- the op sequence changes ------------------------------------------------------------------------------------------


def branching(self: Net, x: torch.Tensor) -> torch.Tensor:
    h = self.layers[0](x).sin()
    h = (h * 2).exp() if x.sum() > 0 else F.dropout(h.cos(), 0.5)
    return self.layers[2](self.layers[1](h).sin()).exp()


def test_another_branch_is_counted_as_drift_and_right():
    model, x = Net(branching), torch.ones(4, 8)
    plan = harshest(model, x)

    ours = copy.deepcopy(model)
    torch.manual_seed(7)
    with lowtide.apply(ours, plan) as applied:
        loss = ours(-x).square().mean()
    loss.backward()

    assert differing(plain(model, -x), outcome(ours, loss)) == []
    assert applied.counts.mismatched > 0
    assert applied.counts.unplanned > 0


def test_fit_makes_a_new_plan_when_the_ops_drift(monkeypatch):
    monkeypatch.setattr(rehearsal, "solve", lambda graph, costs, budget, **options: drop_everything(graph))
    model, x = Net(branching), torch.ones(4, 8)
    fit = lowtide.fit(model, x, budget="100%")
    first = fit.plan
    assert first.counts[RECOMPUTE]

    for _ in range(8):  # until the new kind of step is usual
        model.zero_grad()
        torch.manual_seed(7)
        loss = model(-x).square().mean()
        loss.backward()
        bare = copy.deepcopy(model)
        fit.wait()
        assert differing(plain(bare, -x), outcome(model, loss)) == []

    assert fit.status().in_force and fit.plan is not first
    fit.remove()


class CountsOnDemand(FalseSchema):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).sin()
        other = h.detach().cos() if x.sum() > 0 else torch.ops.lowtide_tests.counted(h.detach(), self.calls)
        return self.linear(h * other)


@pytest.mark.parametrize("matched", [True, False])
def test_an_op_that_is_not_the_planned_one_is_never_dropped(matched, monkeypatch):
    if not matched:
        monkeypatch.setattr(TapedOp, "bind", lambda self, func: self._set_operator(func) or True)
    model, x = CountsOnDemand(), torch.ones(4, 8)
    plan = harshest(model, x)

    assert (differing(plain(model, -x), planned(model, -x, plan)) == []) is matched


# -- what recipes hold ------------------------------------------------------------------------------------------------


def pinning(self: Net, x: torch.Tensor) -> torch.Tensor:
    wide = torch.empty(4, 4096).fill_(0.5)  # cannot be made again, and nothing stores it
    return self.layers[1](self.layers[0](x) * wide.sum(-1, keepdim=True))


def test_the_exact_method_never_pins_more_than_it_saves():
    model, x = Net(pinning), torch.randn(4, 8)
    graph = lowtide.trace(model, x)
    costs = lowtide.Costs(op_ms=(1.0,) * len(graph.ops))
    everything = drop_everything(graph)
    exact = lowtide.solve(graph, costs, budget="100%")

    measured = {}
    for name, plan in (("everything", everything), ("exact", exact)):
        proof = lowtide.verify(model, x, plan, rounds=0)
        measured[name], measured["plain"] = proof.measured_peak_bytes, proof.plain_peak_bytes

    assert measured["everything"] >= measured["plain"]  # the danger is there
    assert measured["exact"] <= measured["plain"]
    assert not any(d.action == SAVE and not d.stored for d in exact.decisions)


def reused(model: nn.Module, x: torch.Tensor) -> list[str]:
    """A dropped storage dies and its address is given out again within one forward pass."""
    return differing(plain(model, x), planned(model, x, harshest(model, x)))


def many_of_one_size(self: Net, x: torch.Tensor) -> torch.Tensor:
    source = torch.Generator(torch.get_default_device()).manual_seed(5)
    for layer in self.layers:
        for _ in range(4):
            x = layer(x).sin()
            x = x * torch.rand(x.shape, generator=source)  # never dropped, in memory that just became free
    return x


def test_an_address_used_again_is_another_storage():
    assert reused(Net(many_of_one_size), torch.randn(64, 8)) == []


def test_an_address_used_again_gives_another_tensor_if_storages_go_by_address(monkeypatch):
    by_address: dict[int, values.Value] = {}
    original = values.placeholder_for

    def placeholder_for(tensor: torch.Tensor, run: object) -> values.Value | values.View | None:
        found = original(tensor, run)
        if found is not None:
            by_address[tensor.untyped_storage().data_ptr()] = found.value
        value = by_address.get(tensor.untyped_storage().data_ptr())
        return values.View(value, tensor) if value is not None and value.run is run else None

    monkeypatch.setattr(tape, "placeholder_for", placeholder_for)
    monkeypatch.setattr(recipes, "placeholder_for", placeholder_for)

    assert reused(Net(many_of_one_size), torch.randn(64, 8))


# -- backward in every form -------------------------------------------------------------------------------------------


def test_a_second_backward_replays_no_more_than_the_first_and_is_equal():
    model, x = mlp(6), torch.randn(4, 16)
    with lowtide.apply(model, harshest(model, x)):
        loss = model(x).square().mean()
    found, counts = [], []
    for retain in (True, True, False):
        model.zero_grad()
        with replays() as seen:
            loss.backward(retain_graph=retain)
        found.append(outcome(model, loss))
        counts.append(len(seen))

    assert counts[0] == len({id(r) for r in seen}) > 0  # each recipe once
    assert counts[1:] == counts[:1] * 2
    assert differing(found[0], found[1]) == differing(found[0], found[2]) == []
    assert differing(found[0], plain(model, x)) == []


def left_by_a_retained_backward() -> int:
    """Replayed tensors alive after ``backward(retain_graph=True)``."""
    model, x = mlp(6), torch.randn(4, 16)
    with lowtide.apply(model, harshest(model, x)):
        loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    return sum(isinstance(o, values.Value) and o.tensor is not None for o in gc.get_objects())


def test_a_retained_backward_leaves_no_replayed_tensor_behind():
    assert left_by_a_retained_backward() == 0


def test_a_retained_backward_keeps_what_it_replayed_without_use_counts(monkeypatch):
    monkeypatch.setattr(recipes, "graph_task_keeps_graph", lambda: False)

    assert left_by_a_retained_backward() > 0


def long_chain(length: int = 20_000) -> tuple[nn.Module, torch.Tensor, Any]:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = model(x)
        for _ in range(length // 2):
            x = x.sin() * 1.01
        return x.sum()

    return nn.Linear(2, 2), torch.randn(2, 2), step


@pytest.mark.parametrize("length", thorough_but((4000,), (4000, 20_000)))  # Python gives up at 1000
def test_a_chain_of_ops_neither_overflows_nor_replays_twice(length):
    model, x, step = long_chain(length)
    plan = harshest(model, x, step)
    with lowtide.apply(model, plan):
        loss = step(model, x)
        dropped = step(model, x)
    with replays() as seen:
        loss.backward()
    assert len(seen) == len({id(r) for r in seen}) == sum(d.action == RECOMPUTE for d in plan.decisions)

    del loss, dropped  # a graph that never runs backward is freed without recursion, too


def test_a_chain_of_recipes_overflows_if_replayed_recursively(monkeypatch):
    def materialise(value: values.Value) -> torch.Tensor:
        if value.tensor is None:
            for needed in value.source.inputs:
                materialise(needed)
            value.source.replay(keep=False)
        return value.tensor

    monkeypatch.setattr(replay, "materialise", materialise)
    model, x, step = long_chain(4000)
    with lowtide.apply(model, harshest(model, x, step)):
        loss = step(model, x)

    with pytest.raises(RecursionError):
        loss.backward()


LONG = """
import os, sys, threading
import torch, lowtide
from lowtide.recording.gradient_sums import GradientSums

def step(model, x):
    for _ in range(2000):
        x = x.sin() * model.weight
    return x.sum()

if sys.argv[1] == "unguarded":
    GradientSums.forget_nodes = lambda self: self._nodes.clear()
model = torch.nn.LayerNorm(8)
threading.stack_size(256 * 1024)  # a chain of 100,000 ops overflows the usual 8 MiB as well
thread = threading.Thread(target=lambda: print(len(lowtide.trace(model, torch.ones(8), step=step).forward_ops)))
thread.start()
thread.join()
sys.stdout.flush()
os._exit(0)  # the graph is gone; threads of PyTorch's that end with the interpreter may abort a process under load
"""


@pytest.mark.parametrize("guarded", thorough_but((True,), (True, False)))
def test_freeing_the_graph_of_a_long_traced_step_overflows_no_stack(guarded):
    done = subprocess.run(
        [sys.executable, "-c", LONG, "guarded" if guarded else "unguarded"], capture_output=True, text=True
    )

    if guarded:
        assert (done.returncode, done.stdout, done.stderr) == (0, "4001\n", "")
    else:
        assert done.returncode == -signal.SIGSEGV


def test_double_backward_is_exact():
    def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sin().square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(g.square().sum() for g in grads)

    model, x = mlp(), torch.randn(4, 16)
    graph_of_forward = harshest(model, x)
    ours = copy.deepcopy(model)
    with lowtide.apply(ours, graph_of_forward) as applied:
        loss = ours(x).sin().square().mean()
    grads = torch.autograd.grad(loss, list(ours.parameters()), create_graph=True)
    total = loss + sum(g.square().sum() for g in grads)
    total.backward()

    assert applied.counts.dropped
    assert differing(plain(model, x, penalty), outcome(ours, total)) == []


def test_double_backward_inside_the_region_is_exact():
    def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(g.square().sum() for g in grads)

    model, x = mlp(), torch.randn(4, 16)

    assert differing(plain(model, x, penalty), planned(model, x, harshest(model, x), penalty)) == []
    assert wrong(model, x, penalty) == []


def test_a_partial_backward_and_then_the_rest_are_equal():
    def partial(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        middle = model[:4](x)
        last = model[4:](middle).square().mean()
        (g,) = torch.autograd.grad(last, middle)
        found.append(g)
        middle.backward(g)
        return last

    found: list[torch.Tensor] = []
    model, x = mlp(), torch.randn(4, 16)
    plan = harshest(model, x, lambda m, x: m[4:](m[:4](x)).square().mean())
    bare, ours = copy.deepcopy(model), copy.deepcopy(model)
    expected = partial(bare, x)
    with lowtide.apply(ours, plan) as applied:
        middle = ours[:4](x)
        last = ours[4:](middle).square().mean()
    (g,) = torch.autograd.grad(last, middle)
    middle.backward(g)

    assert applied.counts.dropped
    assert torch.equal(found[0], g)
    assert differing(outcome(bare, expected), outcome(ours, last)) == []


def test_a_look_at_a_saved_tensor_uses_nothing_up():
    model, x = mlp(), torch.randn(4, 16)
    with lowtide.apply(model, harshest(model, x)):
        out = model(x)
        loss = out.square().mean()

    first = out.grad_fn._saved_self.clone()
    assert torch.equal(first, out.grad_fn._saved_self)
    loss.backward()
    assert differing(plain(model, x), outcome(model, loss)) == []


# -- drift must not make recipes hold what the plan lets go -------------------------------------------------------


class _Wide(nn.Module):
    """Makes something wide, in one of two ways."""

    def __init__(self):
        super().__init__()
        self.other, self.made = False, []

    def forward(self, x):
        wide = (x * 1 if self.other else x).repeat(1, 64)
        self.made.append(weakref.ref(wide.untyped_storage()))
        return wide


def wide_lives_on_after_drift(*, counted: bool = True) -> bool:
    narrow = Net(lambda _, wide: wide.view(4, 64, 8).mean(1))
    model, x = nn.Sequential(nn.Linear(8, 8), _Wide(), narrow, nn.Linear(8, 8)), torch.randn(4, 8)
    plan = harshest(model, x)
    for op in () if counted else program_of(plan).ops:
        op.num_dropped_inputs = 0
    model[1].other = True
    with lowtide.apply(model, plan) as applied:
        loss = model(x).square().mean()
    assert applied.counts.mismatched
    alive = model[1].made[-1]() is not None
    loss.backward()
    return alive


class Checkpointed(nn.Module):
    """Its middle is checkpointed already."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        parts = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)) for _ in range(3))
        self.first, self.middle, self.last = parts
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(torch.utils.checkpoint.checkpoint(self.middle, h, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_that_is_checkpointed_already_is_right(reentrant):
    model, x = Checkpointed(reentrant), torch.randn(8, 16)
    plan = harshest(model, x)

    assert any(d.action == RECOMPUTE for d in plan.decisions)
    assert differing(plain(model, x), planned(model, x, plan)) == []


def test_drift_adds_no_strong_references():
    assert not wide_lives_on_after_drift()


def test_drift_adds_strong_references_without_the_count_of_dropped_inputs():
    assert wide_lives_on_after_drift(counted=False)


# -- a second backward after an optimizer fused into the first ---------------------------------------------------


def second_backward_under_a_fused_optimizer(planned_too: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Net(lambda net, x: net.layers[1](net.layers[0](x).sin().exp())), torch.randn(4, 8)

    def update(p):
        p.data.add_(p.grad, alpha=-0.1)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    plan = harshest(model, x) if planned_too else None
    with lowtide.apply(model, plan) if plan else contextlib.nullcontext():
        loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return model.state_dict()


def test_a_second_backward_under_a_fused_optimizer_is_refused():
    with pytest.raises(ReplayError, match="post-accumulate hooks"):
        second_backward_under_a_fused_optimizer(planned_too=True)


def test_a_second_backward_under_a_fused_optimizer_is_wrong_without_the_refusal(monkeypatch):
    monkeypatch.setattr("lowtide.step.execution_state.ExecutionState.steps_in_backward", lambda self: False)
    ours, plain_state = (second_backward_under_a_fused_optimizer(planned_too=flag) for flag in (True, False))
    assert not all(torch.equal(ours[name], plain_state[name]) for name in plain_state)
