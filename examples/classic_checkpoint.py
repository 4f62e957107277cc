"""Checkpointing by hand, without a second run of your Python.

    python examples/classic_checkpoint.py

Eight blocks with dropout and a counter, each checkpointed. Torch's checkpoint runs each block again in backward, so the
counter counts twice. lowtide runs recorded kernels again.
"""

from functools import partial

import torch
import torch.utils.checkpoint
from torch import nn

import lowtide
from lowtide.measurement.allocator import peak_bytes


class Block(nn.Module):
    calls = 0

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Block.calls += 1
        return x + self.body(x)


torch.manual_seed(0)
blocks = nn.ModuleList(Block() for _ in range(8))
x = torch.randn(512, 256)
ways = {
    "no checkpoint": lambda block, h: block(h),
    "torch.utils.checkpoint": partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "lowtide.checkpoint": lowtide.checkpoint,
}


def step(call) -> None:
    torch.manual_seed(1)
    h = x
    for block in blocks:
        h = call(block, h)
    h.square().mean().backward()


gradients, peaks = {}, {}
for name, call in ways.items():
    blocks.zero_grad()
    step(call)
    gradients[name] = [p.grad.clone() for p in blocks.parameters()]
    same = all(map(torch.equal, gradients[name], gradients["no checkpoint"]))
    Block.calls = 0
    peaks[name] = peak_bytes(partial(step, call)) / 2**20
    assert same
    print(f"{name:24} {peaks[name]:5.1f} MiB, {Block.calls} calls of 8 blocks, gradients equal")

plain_mib, mib = peaks["no checkpoint"], peaks["lowtide.checkpoint"]
print(f"peak {plain_mib:.1f} MiB -> {mib:.1f} MiB, gradients identical")
