"""Runs in each rank of ``test_sharded.py`` and ``cuda/test_compiled.py``: compiled layers that FSDP2 shards."""

from collections import Counter

import torch
import torch.distributed as dist
from support.compiled_layers import Decoder
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.step.subclasses import plain_tensors

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
IDS = torch.randint(0, 64, (4, 32), generator=torch.Generator("cpu").manual_seed(0))


def training(rank, order):
    """Three steps of layers that PyTorch compiles, and of the same layers under a plan.

    Args:
        order: Whether the layers are sharded before or after ``lowtide.compile``.
    """
    torch.set_num_threads(1)
    device = torch.get_default_device()
    if device.type == "cuda":
        from cuda_standin import compiled_values

        compiled_values.install()
    for name in COLLECTIVES:
        setattr(dist, name, counted(name, getattr(dist, name)))
    plain = made()
    for block in plain.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
    shard(plain)
    expected = [*(step(plain, plain) for _ in range(3)), evaluated(plain)]
    del plain
    torch._dynamo.reset()
    model = made()
    if order == "shard first":
        shard(model)
    compiled = lowtide.compile(model, budget="60%")
    if order == "compile first":
        shard(model)
    found = [step(compiled, model)]
    assert compiled.plan is not None, compiled.reason
    found += [step(compiled, model) for _ in range(2)]
    peak = min(
        peak_bytes(lambda: step(compiled, model), device) for _ in range(3)
    )  # gloo's threads free when they come to it
    plan = compiled.plan  # of steps that find gradients there
    found.append(evaluated(compiled))  # which leaves the last parameters gathered: a step after it begins with more
    return {
        "expected": expected, "found": found, "plan": plan.layers, "predicted": plan.predicted_peak_bytes,
        "measured": peak + plan.resident_bytes, "budget": plan.budget_bytes, "reason": compiled.reason,
    }  # fmt: skip


sent: Counter[str] = Counter()


def counted(name, function):
    """Dynamo takes no graph under a mode that would see what is sent."""

    def call(*args, **kwargs):
        sent[name] += 1
        return function(*args, **kwargs)

    return call


def made():
    torch.manual_seed(0)
    return Decoder(layers=4)


def shard(model):
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def evaluated(run):
    with torch.no_grad():
        return run(IDS.to(torch.get_default_device())).item()


def step(run, model):
    """What one step gives, as lists, and what it sends."""
    for p in model.parameters():
        if p.grad is not None:
            next(plain_tensors(p.grad)).zero_()
    sent.clear()
    loss = run(IDS.to(torch.get_default_device()))
    loss.backward()
    gradients = [next(plain_tensors(p.grad)).flatten().tolist() for p in model.parameters()]
    return loss.item(), gradients, dict(sent)
