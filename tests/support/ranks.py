"""Runs in each rank of ``test_data_parallel.py``: one small training with and without lowtide, told as plain values."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import hashlib
import os
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support import quick, quick_planner
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.step import data_parallel, restore

WORLD = 2


def on_every_rank(run: Callable[..., Any], *args: Any, world: int = WORLD) -> list[Any]:
    """``run(rank, *args)`` in each of ``world`` processes, joined by gloo; what they return, by rank.

    The processes are forked from one that has torch and has run no backward: autograd refuses to go on in others.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["support.ranks", "support.sharded_training", "lowtide.api"])
    ends = [context.Pipe(duplex=False) for _ in range(world)]
    device = torch.get_default_device().type
    port = 20_000 + os.getpid() % 20_000
    processes = [
        context.Process(target=_rank, args=(rank, world, port, device, run, args, ends[rank][1]))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        told = [end.recv() if end.poll(180) else (None, "no answer after 180 s") for end, _ in ends]
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    # All of them: the first that fails breaks the connections of the others.
    errors = [f"rank {rank}, exit code {processes[rank].exitcode}: {e}" for rank, (_, e) in enumerate(told) if e]
    assert not errors, "\n".join(errors)
    return [result for result, _ in told]


def start_group(rank: int, world: int, store: dist.Store) -> None:
    """The default group, for tensors of the default device."""
    device = torch.get_default_device().type
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"  # PyTorch's own, on the stand-in's NCCL library
    if device == "standin":
        from accelerator.process_group import BACKEND as backend
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


@contextlib.contextmanager
def _default_device(name: str) -> Iterator[None]:
    """A rank has the default device of the test that started it, and its streams run as late."""
    if name == "cpu":
        yield
        return
    from accelerator.schedules import LATE
    from support.switched_device import switch_to

    device = switch_to(name)
    with device.schedule(LATE, LATE):
        yield
    assert device.launched(), "nothing ran on the accelerator"


def _rank(
    rank: int, world: int, port: int, device: str, run: Callable[..., Any], args: tuple[Any, ...], end: Any
) -> None:
    torch.set_num_threads(1)
    faulthandler.enable()  # says where a rank dies
    if quick.is_quick():
        quick_planner.take_less_effort()
    gc.freeze()  # what was imported is no garbage, and looking through it takes longer than a step
    try:
        with _default_device(device):
            start_group(rank, world, dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0))
            end.send((run(rank, *args), None))
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        end.send((None, traceback.format_exc()))
        raise


class Net(nn.Module):
    """Blocks with dropout and BatchNorm, and a branch that some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
        )
        self.seldom = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, seldom: bool = True) -> torch.Tensor:
        h = self.blocks(x)
        return (self.seldom(h) if seldom else h).square().mean()


def digest(tensors: Any) -> str:
    """Equal for equal bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(b"none" if tensor is None else tensor.detach().cpu().numpy().tobytes())
    return found.hexdigest()


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused parameters": {"find_unused_parameters": True, "seldom": lambda i: i % 2 == 0},
    "static graph": {"static_graph": True},
    "no_sync": {"accumulate": True},
    "gradients as views of buckets": {"gradient_as_bucket_view": True},
}


def all_ways(rank: int, ways: Collection[str]) -> dict[tuple[str, str], dict]:
    """The training in each way, without lowtide and fitted before or after the model is wrapped."""
    return {
        (way, fitted): train(rank, fitted=fitted, **WAYS[way]) for way in ways for fitted in ("", "before", "after")
    }


def noticed(rank: int) -> bool | str:
    """Whether a training goes wrong, or fails, if the reducer sees rehearsals."""
    plain = train(rank, static_graph=True)
    data_parallel.preserve_ddp_state = restore.preserve_ddp_state = lambda model: contextlib.nullcontext()
    try:
        return train(rank, fitted="after", static_graph=True)["gradients"] != plain["gradients"]
    except RuntimeError as error:
        return str(error)


def budgets(rank: int, *of: Any) -> dict[str, Any] | str:
    """A training with a budget for each rank, and one without; the least bytes where there is no plan."""
    try:
        return train(rank, fitted="after", budget=of[rank]) | {"plain": train(rank)}
    except lowtide.BudgetInfeasibleError as error:
        return str(error.least_bytes)


def without_a_loss(rank: int, where: int) -> str:
    """What ``fit`` raises where one rank's model returns no loss."""
    if rank == where:
        Net.forward = lambda self, x, seldom=True: None
    try:
        train(rank, fitted="after")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train(rank: int, *, fitted: str = "", steps: int = 4, budget: Any = "60%", accumulate: bool = False,
          seldom: Callable[[int], bool] = lambda i: True, **options: Any) -> dict[str, Any]:  # fmt: skip
    """A few steps under DistributedDataParallel.

    Args:
        fitted: ``before`` or ``after`` the model is wrapped; not at all when empty.
        seldom: Whether step ``i`` uses the branch.
        options: Of ``DistributedDataParallel``.
    """
    torch.manual_seed(0)
    model = Net()
    data = torch.randn(steps, 256, 32, generator=torch.Generator(torch.get_default_device()).manual_seed(rank))
    fit = lowtide.fit(model, (data[0], seldom(0)), budget=budget) if fitted == "before" else None
    data_parallel = DistributedDataParallel(model, **options)
    if fitted == "after":
        fit = lowtide.fit(data_parallel, (data[0], seldom(0)), budget=budget)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    losses, gradients = [], []
    for i, x in enumerate(data):
        with data_parallel.no_sync() if accumulate and i % 2 == 0 else contextlib.nullcontext():
            loss = data_parallel(x, seldom(i))
            loss.backward()
        losses.append(loss.item())
        gradients.append(digest(p.grad for p in model.parameters()))
        if not accumulate or i % 2:
            optimizer.step()
            optimizer.zero_grad()
    told = {"losses": losses, "gradients": gradients, "weights": digest(model.state_dict().values())}
    if fit is not None:
        told["plan"] = fit.plan
        told["warnings"] = fit.warnings
        told["dropped"] = sum(p.tape.counts.dropped for p in fit._lifecycle.plans_by_shape.plans)
        told["mismatched"] = sum(p.tape.counts.mismatched for p in fit._lifecycle.plans_by_shape.plans)
    return told
