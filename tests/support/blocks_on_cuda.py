"""A process of its own, on a stand-in whose second device gives compiled graphs their values: block sizes and dropout.

    STANDIN_DEVICES=2 python blocks_on_cuda.py BUDGET

How long a kernel takes with which block sizes is drawn. Prints a JSON line: the variants of the plan, the kernels that
were to be timed, whether each variant adds up in the block sizes of the plain code, and whether losses and gradients of
layers with dropout are those of the same layers compiled by PyTorch alone.
"""

import json
import random
import sys
import warnings

import torch
from torch import nn
from torch._inductor.runtime import benchmarking
from torch.nn import functional as F

import lowtide
from cuda_standin import compiled_values
from lowtide.compiled import kernels_later
from lowtide.compiled.captured_layer import Variant

WIDTH, HEAD = 128, 32


class Block(nn.Module):
    """Norms of heads add up few values, for which PyTorch times several block sizes."""

    def __init__(self):
        super().__init__()
        self.norm, self.of_heads = nn.RMSNorm(WIDTH), nn.RMSNorm(HEAD)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD)).transpose(1, 2).chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(self.of_heads(q), self.of_heads(k), v, is_causal=True)
        return x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)


def made():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3))).cuda()


def steps(model, after=lambda: None):
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        x = torch.randn(2, 64, WIDTH, device="cuda")
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        found += [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]
        after()
    return found


def time_by_chance():
    drawn = random.Random(0)
    for kind in type(benchmarking.benchmarker).__mro__[:-1]:
        for name in ("benchmark", "benchmark_gpu"):
            if name in vars(kind):
                setattr(kind, name, lambda self, *args, **kwargs: drawn.random())


def main(budget):
    warnings.simplefilter("ignore")
    compiled_values.install()
    time_by_chance()
    plain = made()
    for block in plain:
        block.compile(fullgraph=True, dynamic=False)
    expected = steps(plain)
    torch._dynamo.reset()
    model, alike, timed = made(), [], []
    adds_up_as, take = Variant.adds_up_as, kernels_later._take_blocks
    Variant.adds_up_as = lambda self, plain: alike.append(adds_up_as(self, plain)) or alike[-1]
    kernels_later._take_blocks = lambda kernel, wanted: timed.append(len(kernel.launchers)) or take(kernel, wanted)
    compiled = lowtide.compile(model, budget=budget)
    found = steps(model, compiled.wait)
    line = {
        "variants": [variant.name for variant in compiled.plan.variants], "timed": timed, "alike": alike,
        "equal": all(map(torch.equal, found, expected)), "planned": compiled.status().planned_steps,
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main(sys.argv[1])
