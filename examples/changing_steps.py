"""Steps that differ: one to three passes of recycling, and a layer left out now and then. Each kind has its plan."""

import copy

import torch
from torch import nn

import lowtide
from lowtide.measurement.allocator import measuring

STEPS = 60


class Recycled(nn.Module):
    """``passes`` says how often the layers run; who calls decides which of them are left out."""

    def __init__(self, width=128, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.dropped = None

    def forward(self, x, passes):
        for _ in range(passes):
            for n, layer in enumerate(self.layers):
                x = x if n == self.dropped else x + layer(x)
        return x


def train(model, budget=None):
    """Losses, the highest peak in MiB, and the status."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fit = budget and lowtide.fit(model, budget=budget, optimizer=optimizer)
    numbers, losses, peaks = torch.Generator().manual_seed(0), [], []
    for n in range(STEPS):
        model.dropped = 2 if torch.rand((), generator=numbers) < 0.1 else None
        x = torch.randn(256, 128, generator=numbers)
        with measuring("cpu") as memory:
            loss = model(x, passes=1 + n % 3).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        peaks.append(memory.peak / 2**20)
        if fit and n < STEPS // 2:
            fit.wait()  # a short example waits for its plans; a long training has them after some steps
    return losses, max(peaks), fit and fit.status()


torch.set_num_threads(1)
torch.manual_seed(0)
model = Recycled()
losses, plain_mib, _ = train(copy.deepcopy(model))
found, mib, status = train(model, budget="70%")
print(status)
assert found == losses, "the bits are the same"
print(f"peak {plain_mib:.1f} MiB -> {mib:.1f} MiB, {status.planned_steps} of {STEPS} steps planned, losses identical")
