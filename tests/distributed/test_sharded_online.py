"""Steps of sharded models that have no plan: what they let go of, and what each guard is there for. One rank."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import sharded_training
from support.online_steps import under
from support.ranks import start_group
from torch import nn
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.device.block_size import in_blocks
from lowtide.errors import ReplayError
from lowtide.measurement.allocator import measuring
from lowtide.step.sharding import observer, windows
from lowtide.tape.online import online_values, sharding, writes
from lowtide.tape.online.live_bytes import LiveBytes
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.online.release import Releaser
from lowtide.tape.online.sharding import OnlineSharding

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = torch.randint(
    0, sharded_training.VOCABULARY, (8, 64), generator=torch.Generator(torch.get_default_device()).manual_seed(1)
)
ROOM = 0.6  # of what the plain step makes


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    start_group(0, 1, dist.HashStore())
    yield
    dist.destroy_process_group()


def net(shard: Callable[..., None] = sharded_training.each_layer, **options: Any) -> sharded_training.Net:
    torch.manual_seed(0)
    model = sharded_training.Net(depth=3)
    shard(model, **options)
    return model


def step(model: nn.Module, between: Callable[[], Any] = int) -> tuple[str, int]:
    """One step from the same random state: the bits of its loss and gradients, and its peak."""
    torch.manual_seed(3)
    gc.collect()  # a model of before that goes meanwhile would count as freed by the step
    with measuring(torch.get_default_device()) as counter:
        loss = model(IDS)
        between()
        loss.backward()
    found = sharded_training.digest([loss, *(p.grad for p in model.parameters())])
    model.zero_grad()
    return found, counter.peak


def online(model: nn.Module, budget_bytes: float, between: Callable[[], Any] = int) -> tuple[str, int, OnlineTape]:
    """The same under the online tape."""
    tape = OnlineTape(model, budget_bytes)
    with under(tape, model):
        found, peak = step(model, between)
    assert not tape.problem
    return found, peak, tape


def tight(**options: Any) -> int:
    """A budget that a plain step passes by far."""
    return int(ROOM * step(net(**options))[1])


# -- what goes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", sharded_training.WHOLE)
def test_first_and_later_steps_keep_the_budget_and_their_bits(shard):
    model, plain = net(shard), net(shard)
    budget = tight(shard=shard)

    for _ in range(2):
        found, peak, tape = online(model, budget)
        assert found == step(plain)[0] and tape.releaser.num_released > 0
        assert peak <= 1.01 * budget


def test_values_of_a_module_go_after_its_parameters_are_freed():
    model, gone = net(), []
    tape = OnlineTape(model, tight())
    with under(tape, model):
        loss = model(IDS)
        gone += [v.windows for v in tape._holdings.released.values()]
        loss.backward()

    assert len({around for around in gone if around}) >= 2


def unproven(budget_bytes: float) -> int:
    """Values that could go and are not proven when the forward pass ends."""
    model = net()
    tape = OnlineTape(model, budget_bytes)
    with under(tape, model):
        loss = model(IDS)
        in_windows = [v for v in tape._holdings if v.windows and v.recipe is not None]
        made = [v for v in in_windows if v.bytes >= 4096 and not (v.crosses or v.why_kept)]
        del loss
    assert made
    return sum(not v.proven for v in made)


def test_what_a_window_made_is_proven_before_its_parameters_are_freed(monkeypatch):
    plain = step(net())[1]
    assert unproven(3 * plain) == 0  # though the budget is never short
    assert unproven(100 * plain) > 0  # far from it nothing is made twice

    monkeypatch.setattr(OnlineSharding, "closing", lambda self: None)
    assert unproven(3 * plain) > 0


class WidelyNormed(nn.Module):
    """Normalises in twice the bytes, as models in bfloat16 do: less is held of what the layer was given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        wide = x.double()
        normed = (wide * wide.square().mean(-1, keepdim=True).rsqrt()).float()
        return x + self.down(self.up(normed).relu())


@pytest.mark.parametrize("waits", [False, True])
def test_a_layer_holds_what_it_was_given_before_nobody_does(waits, monkeypatch):
    if waits:
        monkeypatch.setattr(Releaser, "_release_now_or_never", lambda self, values: None)
    model, x = nn.Sequential(*(WidelyNormed() for _ in range(12))), torch.randn(512, 64)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)

    def peak() -> int:
        with measuring(torch.get_default_device()) as counter:
            model(x).square().sum().backward()
        model.zero_grad()
        return counter.peak

    budget = int(0.4 * max(peak() for _ in range(2)))
    tape = OnlineTape(model, budget)
    with under(tape, model):
        assert (peak() > 1.02 * budget) == waits


def test_gathered_memory_counts_while_it_is_there(monkeypatch):
    model = net()
    _, peak, tape = online(model, tight())
    assert tape.live.peak == pytest.approx(peak, rel=0.01)

    monkeypatch.setattr(LiveBytes, "forget", lambda self, storage: None)
    _, peak, tape = online(model, 10 * peak)
    assert tape.live.peak > 1.03 * peak


def test_what_is_gathered_before_the_step_counts_from_its_start():
    model = net()
    step(model)
    model.unshard()
    tape = OnlineTape(model, 1e9)
    with under(tape, model):
        kind = torch.get_default_device().type
        gathered = [p for name, p in model.named_parameters() if "layers" not in name]
        assert tape.live.now == sum(in_blocks(p.nbytes, kind) for p in gathered)


def test_room_is_made_before_parameters_are_gathered(monkeypatch):
    asked, tape = [], OnlineTape(model := net(), 1e9)
    step(model)
    monkeypatch.setattr(tape.releaser, "make_room", asked.append)
    with under(tape, model):
        step(model)

    assert sum(p.nbytes for p in model.layers[0].parameters()) in asked


# -- what stays -------------------------------------------------------------------------------------------------------


class Saves(torch.autograd.Function):
    """Saves a tensor that no op here reads."""

    @staticmethod
    def forward(ctx, x, saved):
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].detach().isfinite().all(), None


def handing_on(reads: bool) -> sharded_training.Net:
    """What the first layer's ``up`` makes is saved, or read by an op, where that layer's parameters are not there."""
    model, kept = net(), []
    model.layers[0].up.register_forward_hook(lambda _, inputs, output: kept.append(output))

    def take(_: nn.Module, inputs: tuple) -> tuple:
        given = kept.pop()
        if reads:
            return (inputs[0] * given.detach().sin().narrow(-1, 0, inputs[0].shape[-1]).cos(),)
        return (Saves.apply(inputs[0], given),)

    model.norm.register_forward_pre_hook(take)
    return model


@pytest.mark.parametrize("reads", [True, False])
def test_what_leaves_its_window_is_saved(reads, monkeypatch):
    budget = tight() * 3 // 4
    plain, _ = step(handing_on(reads))
    found, _, tape = online(handing_on(reads), budget)
    assert found == plain and tape.crossing_bytes > 0

    monkeypatch.setattr(OnlineTape, "note_crossing", lambda self, value: None)
    monkeypatch.setattr(online_values.StoredValue, "is_root_for", lambda self, reader: self.recipe is None)
    with pytest.raises(ReplayError, match="freed afterwards"):
        for eighths in range(6, 0, -1):  # what goes first depends on how long ops take
            online(handing_on(reads), tight() * eighths // 8)


def test_a_unit_that_backward_does_not_gather_is_not_made_again(monkeypatch):
    def first(**options: Any) -> sharded_training.Net:
        model = net(**options)
        model.layers[0].set_unshard_in_backward(False)
        for p in model.layers[0].parameters():
            p.requires_grad_(False)
        return model

    def made(model: nn.Module) -> list[str]:
        """Ops of released values that read parameters of the first layer."""
        tape = OnlineTape(model, 1)
        torch.manual_seed(3)
        with under(tape, model):
            loss = model(IDS)
            first_layer = min(v.layer for v in tape._holdings if v.layer)
            found = [v for v in (*tape._holdings, *tape._holdings.released.values()) if v.layer == first_layer]
            del loss
        return [v.recipe.name for v in found if v.recipe is not None and v.recipe.gathered]

    model = first()
    step(net())
    assert not made(model)
    monkeypatch.setattr(windows, "NOT_AGAIN", "")
    assert made(first())


class Wavy(nn.Module):
    """Asked to, it runs other ops in the middle of its call, from its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.more = nn.Linear(32, 256), nn.Linear(256, 32), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).sin()
        if self.more:
            h = nn.functional.linear(h.cos(), self.second.weight).sin() @ self.second.weight
        return x + self.second(h.cos().sin())


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.Sequential(*(Wavy() for _ in range(4)))
        for part in self.parts:
            fully_shard(part)
        fully_shard(self)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.parts((ids.float()[..., None] * torch.ones(32)).sin()).square().mean()


def leaving_its_plan() -> tuple[str, bool]:
    """The bits of a step under a plan that runs other ops from the middle of its first part on, and if it said so."""
    model = Waves()
    with lowtide.fit(model, (IDS,), budget=int(0.5 * step(Waves())[1])) as fit:
        step(model)
        for part in model.parts:
            part.more = True
        found, _ = step(model)
        return found, fit.status().in_force


def test_a_step_that_leaves_its_plan_in_a_window_goes_on_in_it(monkeypatch):
    plain = Waves()
    for part in plain.parts:
        part.more = True

    made_in: list[set[frozenset[int]]] = []
    leave = OnlineTape.leave_outer

    def left(tape: OnlineTape) -> None:
        made_in.append({value.windows for value in tape._holdings})
        leave(tape)

    monkeypatch.setattr(OnlineTape, "leave_outer", left)
    assert leaving_its_plan() == (step(plain)[0], False)
    assert made_in[0] and frozenset() not in made_in[0]

    made_in.clear()
    monkeypatch.setattr(OnlineTape, "go_on_inside", lambda self, paths: None)
    leaving_its_plan()
    assert frozenset() in made_in[0]  # as if the first part gathered nothing


# -- writes -----------------------------------------------------------------------------------------------------------


class Rescaled(nn.Module):
    """Layers read what the model writes after them: a tensor that it made, or a buffer."""

    def __init__(self, writes_buffer: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.register_buffer("shift", torch.randn(32))
        self.writes_buffer = writes_buffer
        for layer in self.layers:
            layer.register_forward_hook(self.after)
            fully_shard(layer)
        fully_shard(self)

    def after(self, layer: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        given = self.shift if self.writes_buffer else self.made
        return (output + given).sin().cos().sin()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = (ids.float()[..., None] * torch.ones(32)).sin().requires_grad_()
        for layer in self.layers:
            self.made = (self.shift.detach() * 2).exp()
            x = layer(x)
            with torch.no_grad():
                (self.shift if self.writes_buffer else self.made).mul_(0.5)
        del self.made
        return x.square().mean()


@pytest.mark.parametrize("writes_buffer", [True, False])
def test_a_write_to_what_a_closed_window_is_made_from_goes_by_a_copy(writes_buffer, monkeypatch):
    plain, peak = step(Rescaled(writes_buffer))
    found, _, tape = online(Rescaled(writes_buffer), 0.45 * peak)
    assert found == plain and tape.releaser.num_replayed > 0

    monkeypatch.setattr(writes, "is_closed", lambda value: False)
    with pytest.raises((ReplayError, AssertionError)):
        online(Rescaled(writes_buffer), 0.45 * peak)


def test_a_copy_leaves_autograd_its_own_error():
    peak, model = step(Rescaled(writes_buffer=False))[1], Rescaled(writes_buffer=False)
    model.layers[0].register_forward_pre_hook(lambda _, inputs: (inputs[0] * model.made,))  # saves what is written

    for run in (lambda: step(model), lambda: online(model, 0.45 * peak)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run()


def scaled(model: nn.Module) -> Callable[[], None]:
    def scale() -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)

    return scale


def test_weights_changed_between_forward_and_backward_are_an_error(monkeypatch):
    budget, model = tight() * 3 // 4, net()
    with pytest.raises((ReplayError, RuntimeError), match="in ?place"):
        online(model, budget, between=scaled(model.layers))

    monkeypatch.setattr(observer, "_stamp", lambda param: ())
    model = net()
    with pytest.raises(ReplayError, match="other bits"):  # the seals see it, too
        online(model, budget, between=scaled(model.layers))


def test_a_copy_holds_what_was_there():
    before = torch.arange(4.0)
    copy = sharding.copy_before_write(None, before.untyped_storage())
    before.zero_()

    assert torch.empty(0).set_(copy).tolist() == [0.0, 1.0, 2.0, 3.0]
