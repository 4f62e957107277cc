"""A process of its own, on a stand-in whose second device gives compiled graphs their values: plans of compiled layers.

    STANDIN_DEVICES=2 python compiled_on_cuda.py float32|bfloat16|autocast layers|whole BUDGET...

Prints a JSON line for each budget: the peak that was predicted and the one that PyTorch's allocator counts, and
whether loss and gradients are those of the same layers compiled by PyTorch alone.
"""

import gc
import json
import sys
import warnings

import torch
from support.compiled_layers import Decoder

import lowtide
from cuda_standin import compiled_values

LAYERS, WIDTH, TOKENS = 4, 128, 256


def main(dtype, how, budgets):
    warnings.simplefilter("ignore")
    compiled_values.install()
    ids = torch.randint(0, 64, (4, TOKENS), device="cuda")
    plain, whole = made(dtype), how == "whole"
    run = torch.compile(plain, fullgraph=True, dynamic=False) if whole else plain
    if not whole:
        for block in plain.blocks:
            block.compile(fullgraph=True, dynamic=False)
    expected = step(run, plain, ids, dtype)
    del plain, run
    torch._dynamo.reset()
    model = made(dtype)
    block = None
    gc.collect()
    compiled = lowtide.compile(model, budget=budgets[0], layers=["*"] if whole else None)
    loss_of(compiled, ids, dtype).backward()
    for budget in budgets:
        compiled.set_budget(budget)
        plain_bytes = compiled.plan.plain_peak_bytes - compiled.plan.resident_bytes
        for _ in range(3):  # a plan that takes more than the allocator counts is mended
            found = step(compiled, model, ids, dtype)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        loss_of(compiled, ids, dtype).backward()
        plan = compiled.plan
        line = {
            "predicted_bytes": plan.predicted_peak_bytes - plan.resident_bytes,
            "counted_bytes": torch.cuda.max_memory_allocated() - plan.resident_bytes,
            "plain_bytes": plain_bytes,
            "equal": all(map(torch.equal, found, expected)),
            "variants": [v.name for v in plan.variants],
        }
        print(json.dumps(line), flush=True)


def made(dtype):
    torch.manual_seed(0)
    model = Decoder(LAYERS, WIDTH, dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32).cuda()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def loss_of(run, ids, dtype):
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "autocast"):
        return run(ids)


def step(run, model, ids, dtype):
    for parameter in model.parameters():
        parameter.grad.zero_()
    loss = loss_of(run, ids, dtype)
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
