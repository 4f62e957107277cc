"""An ordinary training loop and a small model with layers, for fits that watch real steps."""

from __future__ import annotations

import copy

import torch
from torch import nn

from lowtide.device.block_size import in_blocks
from lowtide.measurement.allocator import peak_bytes
from lowtide.training.step_memory import StepMemory


class Layered(nn.Module):
    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))
            for _ in range(layers)
        )

    def forward(self, x, scale=1):
        for layer in self.layers:
            x = x + layer(x) * scale
        return x


def batch_of(rows=128, device=None):
    """The same numbers every time. Threads of a test name the device: a default device is that of one thread."""
    device = device or torch.get_default_device()
    return torch.randn(rows, 64, device=device, generator=torch.Generator(device).manual_seed(rows))


def bytes_of(tensors):
    """What they take, as the allocator of their device counts it."""
    return sum(in_blocks(t.nbytes, t.device.type) for t in tensors)


def resident_bytes(model):
    return bytes_of(model.parameters())


def peaks_by_the_tape(monkeypatch):
    """Of steps without a plan that are yet to come, in bytes: what the tape counts itself."""
    counted, note = [], StepMemory.note_peak
    monkeypatch.setattr(
        StepMemory, "note_peak", lambda self, watch: (counted.append(watch.live.peak), note(self, watch))
    )
    return counted


def adamw_bytes(parameters):
    """What AdamW's state takes: two moments of each, and a counter where PyTorch makes it on the default device."""
    parameters, probe = list(parameters), nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    optimizer = torch.optim.AdamW([probe])
    optimizer.step()
    counter = optimizer.state[probe]["step"]
    return 2 * bytes_of(parameters) + (0 if counter.is_cpu else bytes_of([counter] * len(parameters)))


def activation_bytes(model, x):
    copied = copy.deepcopy(model)
    copied(x).square().mean().backward()
    copied.zero_grad()
    return peak_bytes(lambda: copied(x).square().mean().backward())


def train(model, batches, call=lambda model, x: model(x)):
    """Losses of an ordinary loop, and its weights at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    losses = []
    for x in batches:
        loss = call(model, x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return a[0] == b[0] and all(map(torch.equal, a[1], b[1]))


def reasons_of(fit):
    return " ".join(fit.status().reasons)
