"""A plain loop that calls the parts of a model, never the model itself: one `with` makes them a step."""

import copy
import time
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.measurement.allocator import measuring


class Autoencoder(nn.Module):
    def __init__(self, width=256, layers=4):
        super().__init__()
        self.encoder, self.decoder = (
            nn.Sequential(
                *(m for _ in range(layers) for m in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()))
            )
            for _ in range(2)
        )


def train(model, batches, fit=None):
    """Losses, the peak of the last step in MiB, and seconds of all steps from the fourth on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, start = [], 0.0
    for n, x in enumerate(batches):
        start = time.perf_counter() if n <= 3 else start
        with measuring("cpu") as memory:
            # A model that is called as model(x) needs no region.
            with fit.step_region(x) if fit else nullcontext():
                loss = F.mse_loss(model.decoder(model.encoder(x)), x)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if fit and n == 1:
            fit.wait()  # a short example waits for its plan; a long training has it after some steps
    return losses, memory.peak / 2**20, time.perf_counter() - start


torch.set_num_threads(1)
torch.manual_seed(0)
model, batches = Autoencoder(), [torch.randn(2048, 256) for _ in range(10)]
losses, plain_mib, plain_s = train(copy.deepcopy(model), batches)
with lowtide.fit(model, budget="50%") as fit:
    found, mib, seconds = train(model, batches, fit)
    print(fit.status())
assert found == losses, "the bits are the same"
print(f"peak {plain_mib:.1f} MiB -> {mib:.1f} MiB, {plain_s:.2f} s -> {seconds:.2f} s, losses identical")
