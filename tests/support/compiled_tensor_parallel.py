"""Runs in each rank of ``test_tensor_parallel.py``: layers that tensor parallelism has split, each compiled."""

import torch
import torch.distributed as dist
from support.sharded_training import Net, both, columns_and_rows, sequences

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.step.subclasses import plain_tensors

STYLES = {
    "columns and rows": columns_and_rows,
    "sequences": sequences,
    "sequences, sharded": lambda net: both(net, (2, 2), sequences),
}


def training(rank, style, budget="60%"):
    """Three steps of layers that PyTorch compiles, and of the same layers under a plan."""
    torch.set_num_threads(1)
    device = torch.get_default_device()
    if device.type == "cuda":
        from cuda_standin import compiled_values

        compiled_values.install()
    plain = made()
    for layer in plain.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)
    STYLES[style](plain)
    expected = [step(plain, plain) for _ in range(3)] + [evaluated(plain)]
    del plain
    torch._dynamo.reset()
    model = made()
    STYLES[style](model)
    compiled = lowtide.compile(model, budget=budget)
    found = [step(compiled, model)]
    assert compiled.plan is not None, compiled.reason
    found += [step(compiled, model) for _ in range(2)]
    peak = min(peak_bytes(lambda: step(compiled, model), device) for _ in range(3))
    found.append(evaluated(compiled))
    plan = compiled.plan
    return {
        "expected": expected, "found": found, "plan": plan.layers, "predicted": plan.predicted_peak_bytes,
        "measured": peak + plan.resident_bytes, "budget": plan.budget_bytes, "reason": compiled.reason,
        "plain": plan.plain_peak_bytes, "margin": plan.margin_bytes,
    }  # fmt: skip


def made():
    torch.manual_seed(0)
    model = Net(depth=4)
    for layer in model.layers:
        layer.drops = False
    return model


def ids():
    drawn = torch.randint(0, 60, (8, 64), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return drawn.to(torch.get_default_device())


def evaluated(run):
    with torch.no_grad():
        return run(ids()).item()


def step(run, model):
    """What one step gives, as lists, and how many collectives it takes."""
    for p in model.parameters():
        if p.grad is not None:
            next(plain_tensors(p.grad)).zero_()
    before = num_sent()
    loss = run(ids())
    loss.backward()
    gradients = [next(plain_tensors(p.grad)).flatten().tolist() for p in model.parameters()]
    return loss.item(), gradients, num_sent() - before


def num_sent():
    """Of all groups that this rank is in."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)
