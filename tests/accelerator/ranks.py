"""Runs in each process of ``test_process_group.py``."""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh, all_reduce
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from accelerator.schedules import EARLY, LATE


def _gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model(batch).square().mean().backward()
    gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return [g.cpu() for g in gradients]


def gradients(rank: int) -> dict[str, list[Any]]:
    """Of the whole batch in one process, and of its halves in two, as lists of numbers."""
    from accelerator.device import schedule
    from accelerator.process_group import new_group

    group = new_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to("standin")
    batch = torch.randn(4, 8).to("standin")
    half = batch[2 * rank : 2 * rank + 2]
    with schedule(LATE, LATE):
        found = {"one process": _gradients(copy.deepcopy(model), batch)}
        replica = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        found["data parallel"] = _gradients(replica, half)
        mesh = DeviceMesh.from_group(group, "standin")
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
        found["sharded"] = _gradients(model, half)
    return {way: [g.tolist() for g in all_of_it] for way, all_of_it in found.items()}


def a_sum(rank: int, wait: bool) -> list[float]:
    """Of rank + 1, read with or without waiting for it."""
    from accelerator.device import schedule
    from accelerator.process_group import new_group

    group = new_group()
    with schedule(EARLY, LATE):
        values = torch.full((2,), float(rank + 1), device="standin")
        work = all_reduce(values, group=group, async_op=True)
        if wait:
            work.wait()
        return values.tolist()


def planned_gradients(rank: int) -> dict[str, Any]:
    """Of a sharded model under a plan and without one, and how often backward gathers in what was traced."""
    from accelerator.device import schedule
    from accelerator.process_group import new_group
    from lowtide.recording.sharding import NAME

    mesh = DeviceMesh.from_group(new_group(), "standin")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)]
    model = nn.Sequential(*layers).to("standin")
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    batch = torch.randn(512, 32).to("standin")
    found: dict[str, Any] = {}
    with schedule(LATE, LATE):
        found["plain"] = [g.tolist() for g in _gradients(model, batch)]
        model.zero_grad()
        before = [p.full_tensor().tolist() for p in model.parameters()]
        fit = lowtide.fit(model, (batch,), budget="75%")
        found["unchanged"] = before == [p.full_tensor().tolist() for p in model.parameters()]
        found["planned"] = [g.tolist() for g in _gradients(model, batch)]
        found["recomputed"] = fit.plan.counts["recompute"]
        fit.remove()
        graph = lowtide.trace(model, (batch,))
    found["gathered in backward"] = sum(op.backward for op in graph.ops if op.name == NAME)
    return found


def everything(rank: int) -> dict[str, Any]:
    return {
        "gradients": gradients(rank),
        "sum": a_sum(rank, True),
        "sum without waiting": a_sum(rank, False),
        "planned gradients": planned_gradients(rank),
    }
