"""Runs in each rank of ``test_sharded.py``: small trainings of sharded models with and without lowtide."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.tracing.operators import wraps
from lowtide.tracing.subclasses import parts

VOCABULARY = 60


class Collectives(TorchDispatchMode):
    """Counts what is sent, whoever sends it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(map(wraps, types)):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x) * scale))))


class Net(nn.Module):
    """A decoder without attention; ``scale`` is made in the root and read in every block."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(VOCABULARY, width), nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        scale = torch.sigmoid(self.scale(h))
        for layer in self.layers:
            h = layer(h, scale)
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1).float(), ids.flatten())


def each_layer(net: Net, root: dict[str, Any] | None = None, **options: Any) -> None:
    for layer in net.layers:
        fully_shard(layer, **options)
    fully_shard(net, **(options if root is None else root))


def nested(net: Net) -> None:
    """Units in units: what a block makes is read by its own, inner unit."""
    for layer in net.layers:
        fully_shard(layer.down)
        fully_shard(layer)
    fully_shard(net)


def root_only(net: Net) -> None:
    fully_shard(net)


def together(net: Net) -> None:
    """One unit for two modules."""
    for layer in net.layers:
        fully_shard(layer)
    fully_shard([net.norm, net.head])
    fully_shard(net)


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OUTPUT_TOO = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
WAYS: dict[str, dict[str, Any]] = {
    "resharded after forward": {"shard": each_layer},
    "kept after forward": {"shard": each_layer, "reshard_after_forward": False},
    "the root resharded too": {"shard": each_layer, "reshard_after_forward": True},
    "mixed precision": {"shard": each_layer, "mp_policy": HALF},
    "outputs cast": {"shard": each_layer, "mp_policy": OUTPUT_TOO, "root": {}},
    "units in units": {"shard": nested},
    "the root alone": {"shard": root_only},
    "a unit of two modules": {"shard": together},
    "accumulation": {"shard": each_layer, "accumulate": True},
}


def all_ways(rank: int) -> dict[str, tuple[dict, dict]]:
    return {way: (train(rank, **how), train(rank, budget="60%", **how)) for way, how in WAYS.items()}


def digest(tensors: Any) -> str:
    """Equal for equal bits of what this rank has."""
    found = hashlib.sha256()
    for tensor in tensors:
        for part in [] if tensor is None else parts(tensor.detach()):
            found.update(part.flatten().view(torch.uint8).numpy().tobytes())
        found.update(b"|")
    return found.hexdigest()


def batches(rank: int, steps: int) -> Iterator[torch.Tensor]:
    yield from torch.randint(0, VOCABULARY, (steps, 8, 64), generator=torch.Generator().manual_seed(rank))


def train(
    rank: int, *, shard: Any, budget: Any = None, steps: int = 3, accumulate: bool = False, **options: Any
) -> dict:
    """A few steps of a sharded model; fitted where there is a ``budget``."""
    torch.manual_seed(0)
    net = Net()
    shard(net, **options)
    data = list(batches(rank, steps))
    fit = lowtide.fit(net, (data[0],), budget=budget) if budget is not None else None
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(rank)
    losses, gradients = [], []
    with Collectives() as sent:
        for i, ids in enumerate(data):
            last = not accumulate or i % 2 == 1
            net.set_requires_gradient_sync(last)
            loss = net(ids)
            loss.backward()
            losses.append(loss.item())
            gradients.append(digest(p.grad for p in net.parameters()))
            if last:
                optimizer.step()
                optimizer.zero_grad()
    told = {
        "losses": losses,
        "gradients": gradients,
        "sent": dict(sent.seen),
        "state": digest(net.state_dict().values()),
    }
    if fit is not None:
        told |= facts(fit)
    return told


def facts(fit: lowtide.Fit) -> dict[str, Any]:
    proof = fit.verify(rounds=0)
    return {
        "plan": fit.plan, "warnings": fit.warnings, "equal": proof.equal,
        "dropped": sum(p.tape.counts.dropped for p in fit._planned),
        "mismatched": sum(p.tape.counts.mismatched for p in fit._planned),
        "predicted": proof.predicted_peak_bytes, "measured": proof.measured_peak_bytes,
    }  # fmt: skip
