"""Module calls in which the plan drops nothing run without mode, and without hooks where nothing dropped comes in."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from support.training_steps import build_for_drops, differing, outcome, plain
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide.tape.program import program_of
from lowtide.tape.tape import Tape
from lowtide.training.planned_step import PlannedStep, shapes_of_graph

pytestmark = pytest.mark.usefixtures("one_thread")


class Seen(nn.Module):
    """Notes how many modes and hooks are in place while it runs."""

    def __init__(self, log):
        super().__init__()
        self.linear, self.log = nn.Linear(16, 16), log

    def forward(self, x):
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        self.log.append((len(_get_current_dispatch_mode_stack()), hooked))
        return self.linear(x).tanh().square()


def model_and_plan(dropping=("2",)):
    log: list[tuple[int, bool]] = []
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Seen(log) for _ in range(5))), torch.randn(8, 16)
    graph = lowtide.trace(model, x)
    plan = build_for_drops(graph, lambda path: path.startswith(dropping))
    assert plan.counts["recompute"]
    log.clear()
    return model, x, plan, log


def step(model, x, plan):
    torch.manual_seed(7)
    with lowtide.apply(model, plan):
        loss = model(x).square().mean()
    loss.backward()
    return outcome(model, loss)


def test_only_calls_that_drop_are_watched_and_only_their_readers_hooked():
    model, x, plan, log = model_and_plan()
    expected = plain(model, x)
    log.clear()

    found = step(model, x, plan)

    assert differing(expected, found) == []
    assert log == [(0, False), (0, False), (1, True), (0, True), (0, False)]


def test_what_is_dropped_does_not_stay_alive_through_a_call_without_hooks(monkeypatch):
    def alive_after_forward():
        model, x, plan, _ = model_and_plan()
        made = []
        model[2].register_forward_hook(lambda module, args, out: made.append(out.untyped_storage()._weak_ref()))
        with lowtide.apply(model, plan):
            loss = model(x).square().mean()
        alive = torch.UntypedStorage._new_with_weak_ptr(made[0]) is not None
        del loss
        return alive

    assert not alive_after_forward()

    before = Tape._need_less

    def without_looking(self, call, planned):
        planned.needs_hooks = planned.has_actions
        before(self, call, planned)

    monkeypatch.setattr(Tape, "_need_less", without_looking)
    assert alive_after_forward()


def test_an_error_inside_leaves_the_stacks_as_they_were():
    model, x, plan, _ = model_and_plan()

    def fail(module, args):
        raise ValueError("inside")

    hook = model[0].linear.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="inside"), lowtide.apply(model, plan):
        model(x)
    hook.remove()

    assert _get_current_dispatch_mode_stack() == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert differing(plain(model, x), step(model, x, plan)) == []


def test_a_mode_of_the_users_stays_on_top():
    model, x, plan, log = model_and_plan()
    program_of(plan)

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counting.count += 1
            return func(*args, **(kwargs or {}))

    with lowtide.apply(model, plan), Counting():
        loss = model(x).square().mean()
    loss.backward()

    assert {modes for modes, _ in log} == {2}
    with FlopCounterMode(display=False) as plain_flops:
        model(x)
    with lowtide.apply(model, plan), FlopCounterMode(display=False) as flops:
        model(x)
    assert flops.get_total_flops() == plain_flops.get_total_flops()


class Layer(nn.Sequential):
    """Runs only calls, in what ``around`` opens."""

    around = nullcontext

    def __init__(self):
        super().__init__(nn.Linear(16, 16), nn.GELU(), nn.Tanh())

    def forward(self, x):
        with self.around():
            return super().forward(x)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.log = []

    def forward(self, x):
        for layer in self.layers:
            hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
            self.log.append((len(_get_current_dispatch_mode_stack()), hooked))
            x = x + layer(x)
        return x


def squares(model, x):
    return model(x).square().mean()


@contextmanager
def fitted(dropping="layers.2"):
    """A model under ``fit`` with a plan that drops in one layer, and its batch."""
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(8, 16)
    with lowtide.fit(model, x, step=squares, method="none") as fit:
        plan = build_for_drops(fit.graph, lambda path: path.startswith(dropping))
        tape = Tape(program_of(plan), model)
        fit._lifecycle.put(PlannedStep(plan, fit.graph, fit.costs, shapes_of_graph(fit.graph), tape))
        squares(model, x).backward()  # in the first real step under a rehearsed plan every op is followed
        model.zero_grad()
        tape.counts.dropped = 0
        model.log.clear()
        yield model, x, tape


def test_ops_between_dropping_calls_are_not_watched():
    with fitted() as (model, x, tape):
        expected = plain(model, x, squares)
        model.log.clear()
        loss = squares(model, x)
        loss.backward()

    assert model.log == [(0, True)] * 4  # the sums read what is dropped
    assert tape.counts.dropped == 3 and tape.counts.mismatched == 0
    assert differing(expected, outcome(model, loss)) == []


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


packs = []


def packing():
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: packs.append(1) or [tensor], lambda found: found[0])


def forbidding():
    return torch.autograd.graph.disable_saved_tensors_hooks("not here")


@pytest.mark.parametrize(
    ("around", "dropping"), [(Passing, "layers.2"), (packing, "layers.2.0"), (forbidding, "layers.2.0")]
)
def test_what_the_model_opens_around_dropping_calls_stays_on_top(around, dropping, monkeypatch):
    with fitted(dropping) as (model, x, tape):
        monkeypatch.setattr(Layer, "around", staticmethod(around))
        packs.clear()
        expected = plain(model, x, squares)
        num_packs = len(packs)
        loss = squares(model, x)
        assert _get_current_dispatch_mode_stack() == []
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        loss.backward()

    assert len(packs) == 2 * num_packs
    assert tape.counts.dropped
    assert differing(expected, outcome(model, loss)) == []
