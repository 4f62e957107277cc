"""Runs in each rank of ``test_sharded.py``: small trainings of sharded models with and without lowtide."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from support.toy_graphs import unit_costs
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.measurement.allocator import measuring
from lowtide.step.operators import is_wrapper_type
from lowtide.step.subclasses import plain_tensors
from lowtide.training import rehearsal

VOCABULARY = 60


def an_ms_an_op(graph: StepGraph, **_: Any) -> Costs:
    """In place of ``measure``: what ops cost is no question here, and finding out takes most of the time."""
    return unit_costs(graph)


class Collectives(TorchDispatchMode):
    """Counts what is sent, whoever sends it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(map(is_wrapper_type, types)):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func) and "wrap" not in str(func):
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("calls", torch.zeros(()))
        self.drops = True

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.down(nn.functional.gelu(self.up(self.norm(x) * scale)))
        return x + (self.drop(h) if self.drops else h)


class Net(nn.Module):
    """A decoder without attention; ``scale`` is made in the root and read in every block."""

    def __init__(self, width: int = 32, depth: int = 3, words: int = VOCABULARY) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(words, width), nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        scale = torch.sigmoid(self.scale(h))
        for layer in self.layers:
            h = layer(h, scale)
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1).float(), ids.flatten())


def each_layer(net: Net | Stage, root: dict[str, Any] | None = None, **options: Any) -> None:
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


def columns_and_rows(net: Net, mesh: DeviceMesh | None = None) -> None:
    """Tensor parallelism."""
    mesh = mesh or init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    for layer in net.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(net, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def sequences(net: Net, mesh: DeviceMesh | None = None) -> None:
    """Sequence parallelism: between matrices each rank has some of the positions."""
    mesh = mesh or init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    for layer in net.layers:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "scale": SequenceParallel(),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(net, mesh, plan)


def both(net: Net, shape: tuple[int, int], parallel: Any = columns_and_rows) -> None:
    """Tensor parallelism in each row of a mesh, FSDP2 along its columns."""
    mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=("data", "tensor"))
    parallel(net, mesh["tensor"])
    each_layer(net, mesh=mesh["data"])


WHOLE = (each_layer, nested, root_only, together)  # every rank has batches of its own
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
    "uneven shards": {"shard": each_layer, "words": VOCABULARY + 1},
}


IN_PARTS: dict[str, dict[str, Any]] = {
    "tensor parallel": {"shard": columns_and_rows},
    "sequence parallel": {"shard": sequences},
    "FSDP2 over one, tensor parallel": {"shard": both, "shape": (1, 2)},
    "FSDP2, tensor parallel over one": {"shard": both, "shape": (2, 1)},
}
ON_FOUR = {"FSDP2 and sequence parallel": {"shard": both, "shape": (2, 2), "parallel": sequences}}


def all_ways(rank: int, ways: Collection[str]) -> dict[str, tuple[dict, dict]]:
    named = {way: how for way, how in (WAYS | IN_PARTS | ON_FOUR).items() if way in ways}
    return {way: (train(rank, **how), train(rank, budget="70%", **how)) for way, how in named.items()}


WATCHED = dict.fromkeys((
    "resharded after forward", "mixed precision", "units in units", "accumulation", "tensor parallel",
    "FSDP2, tensor parallel over one",
))  # fmt: skip


def all_ways_watched(rank: int, ways: Collection[str]) -> dict[str, tuple[dict, dict]]:
    """As ``all_ways``, with no batch for ``fit``."""
    named = {way: how for way, how in (WAYS | IN_PARTS).items() if way in ways}
    return {way: _watched(rank, **how) for way, how in named.items()}


def without_a_plan(rank: int, ways: Collection[str]) -> dict[str, tuple[dict, dict, int]]:
    """Two steps that no plan is there for, plain and within so many bytes."""
    named = {way: how for way, how in (WAYS | IN_PARTS).items() if way in ways}
    return {way: _within_bytes(rank, **how) for way, how in named.items()}


def _within_bytes(rank: int, *, share: float = 0.65, **how: Any) -> tuple[dict, dict, int]:
    plain = train(rank, measured=True, **how)
    budget = int(share * max(plain["peaks"]))
    return plain, train(rank, measured=True, budget=budget, watched=True, **how), budget


def leaving_the_plan(rank: int) -> tuple[dict, dict]:
    """From the fifth step on the blocks run other ops."""
    return _watched(rank, shard=each_layer, steps=22, leaves_plan=True)


def _watched(rank: int, steps: int = 6, **how: Any) -> tuple[dict, dict]:
    return train(rank, steps=steps, **how), train(rank, steps=steps, budget="70%", watched=True, **how)


def sharded_after_fit(rank: int) -> tuple[dict, dict]:
    """``fit`` saw the model whole."""
    return train(rank, shard=each_layer), train(rank, shard=each_layer, budget="70%", watched=True, fitted_first=True)


def digest(tensors: Any) -> str:
    """Equal for equal bits of what this rank has."""
    found = hashlib.sha256()
    for tensor in tensors:
        for part in [] if tensor is None else plain_tensors(tensor.detach()):
            found.update(part.flatten().view(torch.uint8).cpu().numpy().tobytes())
        found.update(b"|")
    return found.hexdigest()


def batches(rank: int, steps: int) -> Iterator[torch.Tensor]:
    yield from torch.randint(
        0, VOCABULARY, (steps, 8, 64), generator=torch.Generator(torch.get_default_device()).manual_seed(rank)
    )


def train(
    rank: int, *, shard: Any, budget: Any = None, watched: bool = False, steps: int = 2, accumulate: bool = False,
    words: int = VOCABULARY, leaves_plan: bool = False, fitted_first: bool = False, measured: bool = False,
    **options: Any,
) -> dict:  # fmt: skip
    """A few steps of a sharded model; fitted where there is a ``budget``, on a batch unless it is ``watched``.

    Args:
        measured: Its peaks count what is resident, too. No plan is waited for, and none is verified.
    """
    rehearsal.measure = an_ms_an_op
    if measured:  # workspaces of matrix products, which CUDA takes once for each thread, are larger than these steps
        one = torch.ones(1, 1, requires_grad=True)
        (one @ one).backward()
    torch.manual_seed(0)
    net = Net(words=words)
    fit = lowtide.fit(net, budget=budget) if fitted_first else None
    shard(net, **options)
    # Ranks that share a batch have to have the same: those of one row of the mesh.
    share = 1 if shard in WHOLE else 2 if "shape" not in options else options["shape"][1]
    data = list(batches(rank // share, steps))
    if budget is not None and fit is None:
        fit = lowtide.fit(net, None if watched else (data[0],), budget=budget)
    # foreach, an accelerator's default, refuses DTensors beside other tensors
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    torch.manual_seed(rank // share)
    losses, gradients, why_not, peaks = [], [], [], []
    with Collectives() as sent:
        for i, ids in enumerate(data):
            last = not accumulate or i % 2 == 1
            if isinstance(net, FSDPModule):
                net.set_requires_gradient_sync(last)
            there = sum(t.nbytes for t in plain_tensors(*net.parameters(), *net.buffers(), ids))
            with measuring(torch.get_default_device()) if measured else nullcontext() as counter:
                loss = net(ids)
                loss.backward()
            if counter is not None:
                peaks.append(there + counter.peak)
            losses.append(loss.item())
            gradients.append(digest(p.grad for p in net.parameters()))
            if last:
                optimizer.step()
                optimizer.zero_grad()
            if watched and fit is not None:
                why_not.append(fit.status().why_not)
                if i in (3, 5):
                    fit.wait(60)
            if leaves_plan and i == 3:
                for layer in net.layers:
                    layer.drops = False
    told = {
        "losses": losses,
        "gradients": gradients,
        "sent": dict(sent.seen),
        "state": digest(net.state_dict().values()),
    }
    if measured:
        told["peaks"] = peaks
    if fitted_first or (measured and fit is not None):
        assert fit is not None
        told["reasons"] = fit.status().reasons
    elif fit is not None:
        told |= facts(fit, (data[0],)) | {"why_not": why_not}
    return told


def facts(fit: lowtide.Fit, batch: Any = None) -> dict[str, Any]:
    proof = fit.verify(batch, rounds=0)
    return {
        "plan": fit.plan, "warnings": fit.warnings, "equal": proof.equal, "status": fit.status(),
        "dropped": sum(p.tape.counts.dropped for p in fit._lifecycle.plans_by_shape.plans),
        "mismatched": sum(p.tape.counts.mismatched for p in fit._lifecycle.plans_by_shape.plans),
        "predicted": proof.predicted_peak_bytes, "measured": proof.measured_peak_bytes,
    }  # fmt: skip


def with_a_budget(rank: int, *of: Any) -> tuple[dict, dict] | str:
    """Trainings without and with a budget of each rank's own; the least bytes where there is no plan."""
    try:
        return train(rank, shard=each_layer), train(rank, shard=each_layer, budget=of[rank])
    except lowtide.BudgetInfeasibleError as error:
        return str(error.least_bytes)


def without_a_loss(rank: int, where: int) -> str:
    """What ``fit`` raises where one rank's step returns no loss; the other's backward would wait for it."""
    net = Net()
    each_layer(net)
    try:
        lowtide.fit(net, next(batches(rank, 1)), budget="60%", step=lambda m, x: (m(x), None)[rank == where])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


class Stage(nn.Module):
    """Half of ``Net``; the first has the embedding, the second the head."""

    def __init__(self, net: Net, rank: int) -> None:
        super().__init__()
        half = len(net.layers) // 2
        self.layers = net.layers[:half] if rank == 0 else net.layers[half:]
        self.embed, self.head = (net.embed, None) if rank == 0 else (None, net.head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            h = layer(h, torch.ones(()))
        return h if self.head is None else self.head(h)


def in_stages(rank: int, schedule: str) -> tuple[dict, dict]:
    """A pipeline of two stages, each fitted by itself on one microbatch, and the same without lowtide.

    With four ranks each stage is fully sharded over two of them.
    """
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, dist.get_world_size() // 2), mesh_dim_names=("stage", "data")
    )
    return _pipeline(rank, schedule, mesh, None), _pipeline(rank, schedule, mesh, "70%")


def _pipeline(rank: int, schedule: str, mesh: DeviceMesh, budget: Any, microbatches: int = 4) -> dict:
    rehearsal.measure = an_ms_an_op
    torch.manual_seed(0)
    number = mesh["stage"].get_local_rank()
    stage = Stage(Net(depth=6), number)
    if mesh["data"].size() > 1:
        each_layer(stage, mesh=mesh["data"])
    data = list(batches(mesh["data"].get_local_rank(), 2))
    ids = data[0].chunk(microbatches)[0]
    sample = ids if number == 0 else torch.randn(*ids.shape, 32, requires_grad=True)
    fit = lowtide.fit(stage, (sample,), budget=budget) if budget is not None else None
    piped = PipelineStage(stage, number, 2, torch.get_default_device(), group=mesh["stage"].get_group())

    def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    run = SCHEDULES[schedule](piped, n_microbatches=microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01, foreach=False)
    torch.manual_seed(rank)
    losses: list[torch.Tensor] = []
    gradients = []
    with Collectives() as sent:
        for batch in data:
            if number == 0:
                run.step(batch)
            else:
                run.step(target=batch, losses=losses)
            gradients.append(digest(p.grad for p in stage.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    told = {
        "losses": [loss.item() for loss in losses], "gradients": gradients, "sent": dict(sent.seen),
        "state": digest(stage.state_dict().values()),
    }  # fmt: skip
    return told if fit is None else told | facts(fit, (sample,))


def on_four(rank: int) -> dict[str, tuple[dict, dict]]:
    """What two ranks cannot show."""
    return all_ways(rank, ON_FOUR) | {"sharded stages": in_stages(rank, "1F1B")}
