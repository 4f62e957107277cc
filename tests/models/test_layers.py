"""Layers of ``torch.nn`` and shapes of model that no transformers class has: bitwise, whatever the budget.

Each is trained for two steps (the second meets moved weights, moved buffers, another random state) plainly and under
three plans: everything dropped that may be, the least peak there is, half of the activation memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.training_steps import differing, drop_everything, outcome
from torch import nn
from torch.nn.utils import parametrizations, rnn
from zoo.examine import plausible_costs

import lowtide
from lowtide.plan import RECOMPUTE, Plan
from lowtide.step.batches import batch_tensors
from lowtide.tracing.tracer import run_step

ROWS, WIDTH, STEPS = 4, 16, 24
FEW = 4  # steps of what makes many ops of each
QUICKLY = {"node_limit": 5, "gap": 0.1}  # a plan that is not the best is as good a test


pytestmark = pytest.mark.usefixtures("one_thread")


def images(channels: int = 3, size: int = 16) -> torch.Tensor:
    return torch.randn(ROWS, channels, size, size)


def sequences(steps: int = STEPS) -> torch.Tensor:
    return torch.randn(ROWS, steps, WIDTH)


def two_steps(make: Callable[[], nn.Module], batch: Any, step: Any, plan: Plan | None) -> dict[str, Any]:
    """What two steps of a new model leave behind: outcomes, and the batch itself."""
    model = made(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: dict[str, Any] = {}
    for number in range(2):
        mine = copy.deepcopy(batch)
        torch.manual_seed(number)
        if plan is None:
            loss, _ = run_step(model, mine, step)
        else:
            with lowtide.apply(model, plan) as applied:
                loss, _ = run_step(model, mine, step)
            assert applied.counts.mismatched == applied.counts.unplanned == 0
        loss.backward()
        found |= {f"{name} of step {number}": value for name, value in outcome(model, loss).items()}
        found |= {f"input {i} of step {number}": x.detach() for i, x in enumerate(batch_tensors(mine))}
        optimizer.step()
        optimizer.zero_grad()
    return found


def plans_of(model: nn.Module, batch: Any, step: Any) -> dict[str, Plan]:
    """Everything dropped; the least; half, where there is a plan."""
    graph = lowtide.trace(model, copy.deepcopy(batch), step=step)
    costs = plausible_costs(graph)
    plans = {"all": drop_everything(graph)}
    with pytest.raises(lowtide.BudgetInfeasibleError) as error:
        lowtide.solve(graph, costs, 1, **QUICKLY)
    plans["least"] = lowtide.solve(graph, costs, error.value.least_bytes, **QUICKLY)
    with suppress(lowtide.BudgetInfeasibleError):  # a budget a little below the least that was named may do
        plans["half"] = lowtide.solve(graph, costs, "50%", **QUICKLY)
    return plans


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """The same model each time; a copy would not do, weights made by a hook have none."""
    torch.manual_seed(1)
    return make()


def check(make: Callable[[], nn.Module], batch: Any, step: Any = None, *, half: bool = False) -> None:
    """``half``: there must be a plan for half of the activation memory."""
    plans = plans_of(made(make), batch, step)
    assert plans["all"].counts[RECOMPUTE], "nothing to recompute: the case is no test"
    assert "half" in plans or not half, plans["least"].predicted_fraction
    expected = two_steps(make, batch, step, None)
    for name, plan in plans.items():
        assert not differing(expected, two_steps(make, batch, step, plan)), name


# -- the layers of torch.nn, one by one -------------------------------------------------------------------------------

LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d(4), images),
    "AlphaDropout": (lambda: nn.AlphaDropout(0.3), sequences),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), images),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), images),
    "BatchNorm2d, cumulative": (lambda: nn.BatchNorm2d(3, momentum=None), images),
    "CELU": (lambda: nn.CELU(inplace=True), sequences),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), lambda: images(4)),
    "Conv1d, circular": (lambda: nn.Conv1d(STEPS, 8, 3, padding=1, padding_mode="circular"), sequences),
    "Conv3d": (lambda: nn.Conv3d(2, 4, 3), lambda: torch.randn(2, 2, 6, 6, 6)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), images),
    "Dropout2d": (lambda: nn.Dropout2d(0.4), images),
    "FeatureAlphaDropout": (lambda: nn.FeatureAlphaDropout(0.3), images),
    "Fold and Unfold": (
        lambda: nn.Sequential(nn.Unfold(2, stride=2), nn.Tanh(), nn.Fold((16, 16), 2, stride=2)), images
    ),
    "FractionalMaxPool2d": (lambda: nn.FractionalMaxPool2d(2, output_ratio=0.7), images),
    "GLU": (nn.GLU, sequences),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), lambda: images(4)),
    "Hardswish": (lambda: nn.Hardswish(inplace=True), sequences),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), images),
    "LPPool2d": (lambda: nn.LPPool2d(2, 2), images),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), sequences),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), images),
    "MaxPool2d": (lambda: nn.MaxPool2d(3, 2, 1), images),
    "PReLU": (nn.PReLU, sequences),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), lambda: images(4)),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH), sequences),
    "RReLU": (nn.RReLU, sequences),
    "RReLU, in place": (lambda: nn.RReLU(inplace=True), sequences),
    "ReflectionPad2d": (lambda: nn.ReflectionPad2d(2), images),
    "Softmax2d": (nn.Softmax2d, images),
    "Softmin": (lambda: nn.Softmin(dim=-1), sequences),
    "Threshold": (lambda: nn.Threshold(0.1, 0.0, inplace=True), sequences),
    "TransformerDecoderLayer": (lambda: Itself(nn.TransformerDecoderLayer(WIDTH, 4, 32, batch_first=True)), sequences),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(WIDTH, 4, 32, norm_first=True), sequences),
    "Upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), images),
}  # fmt: skip


class Itself(nn.Module):
    """A layer of two inputs, given one twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x)


class Twice(nn.Module):
    """The layer between others, so that what it reads and makes can be dropped."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.layer = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(x * self.scale)
        return torch.tanh(self.layer(torch.exp(x) - 1) * self.scale).square() * 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_torch_trains_bitwise(name):
    make, batch = LAYERS[name]

    check(lambda: Twice(make), batch())


# -- recurrent --------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A recurrent layer of several levels on sequences of different lengths, packed."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.layer = kind(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.after = nn.Linear(2 * WIDTH, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(torch.tanh(self.before(x)), lengths, batch_first=True, enforce_sorted=False)
        out, _ = rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return F.gelu(self.after(F.gelu(out)))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_on_packed_sequences_trains_bitwise(kind):
    check(lambda: Recurrent(kind), (sequences(FEW), torch.tensor([FEW, 2, 3, FEW])))


class Unrolled(nn.Module):
    """One cell, a step at a time: the same weights in every op."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, outs = None, []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            outs.append(torch.sin(state[0] if isinstance(state, tuple) else state))
        return torch.stack(outs, 1)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_a_cell_unrolled_over_time_trains_bitwise(kind):
    check(lambda: Unrolled(kind(WIDTH, WIDTH)), sequences(FEW))


# -- attention --------------------------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Self-attention under a padding mask, weights returned and used; a decoder on top of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True) for _ in range(3))
        layer = nn.TransformerDecoderLayer(WIDTH, 4, 32, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 1)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.zeros(())
        y = x
        for block in self.blocks:
            out, weights = block(y, y, y, key_padding_mask=padding)
            y, seen = y + out, seen + weights.square().mean()
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.decoder(y, x, tgt_mask=causal, memory_key_padding_mask=padding), seen


def test_multihead_attention_with_masks_and_weights_trains_bitwise():
    padding = torch.arange(STEPS)[None] >= torch.tensor([STEPS, 9, 12, STEPS])[:, None]

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        out, seen = model(*batch)
        return out.square().mean() + seen

    check(Attending, (sequences(), padding), step, half=True)


# -- parametrizations -------------------------------------------------------------------------------------------------

WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,  # moves two buffers in each forward pass
    "orthogonal": parametrizations.orthogonal,
    "weight_norm, by a hook": nn.utils.weight_norm,
    "spectral_norm, by a hook": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRAPPED)
def test_a_parametrized_weight_trains_bitwise_and_its_buffers_move_once(name):
    wrap = WRAPPED[name]

    def make() -> nn.Module:
        layers = [m for _ in range(4) for m in (wrap(nn.Linear(WIDTH, WIDTH)), nn.GELU(), nn.LayerNorm(WIDTH))]
        return nn.Sequential(*layers)

    # Late in a process of many tests the loss's mean was twice recorded with a workspace larger than the whole step's.
    check(make, sequences(), half="hook" not in name)


# -- convolutional nets -----------------------------------------------------------------------------------------------


class ResBlock(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.time, self.drop = nn.Linear(WIDTH, outer), nn.Dropout(0.1)
        self.short = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.short(x) + self.conv2(self.drop(F.silu(self.norm2(h))))


@dataclass
class UNetOutput:
    sample: torch.Tensor
    skips: list[torch.Tensor]


class UNet(nn.Module):
    """As in diffusers: time embedding, residual blocks, attention in the middle, long skips, a dataclass returned."""

    def __init__(self, base: int = 8) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, base, 3, padding=1), nn.Conv2d(base, 3, 3, padding=1)
        sizes = [base, base, 2 * base]
        self.down = nn.ModuleList(ResBlock(a, b) for a, b in pairwise(sizes))
        self.shrink = nn.ModuleList(nn.Conv2d(b, b, 3, stride=2, padding=1) for b in sizes[1:])
        self.middle = nn.MultiheadAttention(sizes[-1], 2, batch_first=True)
        self.up = nn.ModuleList(ResBlock(2 * b, a) for a, b in reversed(list(pairwise(sizes))))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> UNetOutput:
        angle = at[:, None] * torch.exp(-torch.arange(WIDTH // 2))
        time = torch.cat([angle.sin(), angle.cos()], dim=1)
        h, skips = self.enter(x), []
        for block, shrink in zip(self.down, self.shrink):
            h = block(h, time)
            skips.append(h)
            h = shrink(h)
        flat = h.flatten(2).transpose(1, 2)
        h = h + self.middle(flat, flat, flat, need_weights=False)[0].transpose(1, 2).view_as(h)
        for block, skip in zip(self.up, reversed(skips)):
            h = F.interpolate(h, scale_factor=2.0, mode="nearest")
            h = block(torch.cat([h, skip], dim=1), time)
        return UNetOutput(self.leave(F.silu(h)), skips)


def test_a_unet_with_long_skips_trains_bitwise():
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(*batch)
        return F.mse_loss(out.sample, batch[0]) + sum(s.square().mean() for s in out.skips)

    check(UNet, (images(), torch.tensor([0.0, 10.0, 500.0, 999.0])), step)


class MobileBlock(nn.Module):
    """As in timm: expansion, depthwise convolution, squeeze and excite, layer scale, stochastic depth."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 2 * width
        self.expand = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish(True))
        self.deep = nn.Sequential(
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(True)
        )
        self.squeeze, self.excite = nn.Conv2d(inner, 4, 1), nn.Conv2d(4, inner, 1)
        self.out = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.deep(self.expand(x))
        gate = self.excite(F.relu(self.squeeze(h.mean((2, 3), keepdim=True)), inplace=True))
        h = self.out(h * F.hardsigmoid(gate)) * self.scale
        if self.training:
            alive = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.8)
            h = h * alive.div_(0.8)
        return x + h


def test_a_mobile_conv_net_trains_bitwise_and_its_statistics_move_once():
    def make() -> nn.Module:
        stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 5))
        return nn.Sequential(stem, *(MobileBlock(8) for _ in range(4)), head)

    labels = torch.tensor([0, 1, 2, 3])
    check(
        make,
        (images(size=32), labels),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1),
        half=True,
    )


# -- shared and tied weights ------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One block for all layers, its first weight transposed in the last; embedding and head are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for _ in range(5):
            h = h + self.block(h)
        return self.head(torch.tanh(F.linear(F.linear(h, self.block[1].weight), self.block[1].weight.t())))


def test_shared_blocks_and_tied_weights_train_bitwise():
    check(Shared, torch.randint(0, 20, (ROWS, STEPS)), half=True)


# -- what goes in and what comes out ----------------------------------------------------------------------------------


class Pair(NamedTuple):
    mean: torch.Tensor
    spread: torch.Tensor


class Nested(nn.Module):
    """Returns whatever ``shape`` makes of three tensors, one of them a view of another."""

    def __init__(self, shape: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.GELU()) for _ in range(4))
        self.shape = shape

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.shape(x, x[:, ::2].transpose(1, 2), x.exp().std(-1))


def leaves(found: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``found``, however deep."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, dict):
        yield from (leaf for value in found.values() for leaf in leaves(value))
    elif isinstance(found, (list, tuple)):
        yield from (leaf for value in found for leaf in leaves(value))
    elif hasattr(found, "__dict__"):
        yield from leaves(vars(found))


SHAPES: dict[str, Callable[..., Any]] = {
    "tuple": lambda a, b, c: (a, b, c),
    "dict": lambda a, b, c: {"a": a, "b": b, "c": c},
    "nested": lambda a, b, c: {"a": [a, {"b": (b, None)}], "c": (c, "a word", 3)},
    "named tuple": lambda a, b, c: (Pair(a, c), b),
    "dataclass": lambda a, b, c: UNetOutput(a, [b, c]),
    "the same twice": lambda a, b, c: [a, a, b],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_may_return_anything(shape):
    check(
        lambda: Nested(SHAPES[shape]),
        sequences(),
        lambda model, batch: sum(t.square().mean() for t in leaves(model(batch))),
    )


@pytest.mark.parametrize("shape", ["tuple", "dict", "nested", "named tuple", "dataclass"])
def test_without_a_step_the_loss_is_of_the_first_tensor_returned(shape):
    check(lambda: Nested(SHAPES[shape]), sequences())


class Mutating(nn.Module):
    """Scales its input in place, fills its mask, and takes things out of the dict that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, extra: dict[str, torch.Tensor], seen: list[torch.Tensor]) -> torch.Tensor:
        mask = extra.pop("mask")
        x.mul_(0.5).add_(1)
        mask[:, -1] = 0
        self.calls += 1
        for layer in self.layers:
            x = F.gelu(layer(x)) * mask[..., None]
            seen.append(x.detach().mean())
        extra["out"] = x
        return torch.tanh(x)


def test_a_model_that_writes_its_inputs_trains_bitwise():
    batch = {"x": sequences(), "extra": {"mask": torch.ones(ROWS, STEPS)}, "seen": []}

    check(Mutating, batch)


@dataclass
class Loader:
    """A batch with a name for everything, as graph libraries have them."""

    x: torch.Tensor
    seen: dict[str, torch.Tensor]


class FromLoader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))

    def forward(self, batch: Loader) -> torch.Tensor:
        batch.x.mul_(0.5)
        batch.seen["count"] += 1
        return self.layers(batch.x)


def test_a_batch_may_be_a_dataclass_and_a_rehearsal_leaves_it_as_it_was():
    batch = Loader(sequences(), {"count": torch.zeros(())})
    x = batch.x.clone()

    lowtide.trace(made(FromLoader), (batch,))

    assert torch.equal(batch.x, x) and batch.seen["count"] == 0
    check(FromLoader, (batch,))
