"""A loop written with Accelerate, bfloat16 and accumulated gradients: `lowtide.fit` is the only line that is new."""

import copy
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import lowtide
from lowtide.measurement.allocator import measuring


def train(model, dataset, budget=None):
    """Losses, the peak of the last step in MiB, seconds of all steps from the fourth on, and the fit."""
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, batch_size=16))
    fit = budget and lowtide.fit(accelerator.unwrap_model(model), budget=budget, optimizer=optimizer)
    losses, start = [], 0.0
    for n, tokens in enumerate(loader):
        start = time.perf_counter() if n <= 3 else start
        with accelerator.accumulate(model), measuring("cpu") as memory:
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if fit and n == 1:
            fit.wait()  # a short example waits for its plan; a long training has it after some steps
    return losses, memory.peak / 2**20, time.perf_counter() - start, fit


torch.set_num_threads(1)
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(128, nhead=4, dim_feedforward=512, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Embedding(100, 128), nn.TransformerEncoder(layer, num_layers=4), nn.Linear(128, 100))
dataset = torch.randint(0, 100, (128, 64))
losses, plain_mib, plain_s, _ = train(copy.deepcopy(model), dataset)
found, mib, seconds, fit = train(model, dataset, budget="60%")
print(fit.status())
fit.remove()
assert found == losses, "the bits are the same"
print(f"peak {plain_mib:.1f} MiB -> {mib:.1f} MiB, {plain_s:.2f} s -> {seconds:.2f} s, losses identical")
