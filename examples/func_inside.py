"""``torch.func`` inside a model: an ensemble of heads by ``vmap``, and slopes of a potential by ``grad``, each step."""

import copy

import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

import lowtide
from lowtide.measurement.allocator import measuring

STEPS, WIDTH = 8, 128


def layer(width=WIDTH):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Ensemble(nn.Module):
    """A body of layers; heads that ``vmap`` runs as one; the potential of its output, whose slope is the answer."""

    def __init__(self, layers=6, heads=4):
        super().__init__()
        self.body = nn.ModuleList(layer() for _ in range(layers))
        copies = [nn.Linear(WIDTH, WIDTH) for _ in range(heads)]
        stacked, _ = stack_module_state(copies)
        self.weight, self.bias = (nn.Parameter(stacked[name].detach()) for name in ("weight", "bias"))
        self.head = (copies[0].to("meta"),)  # in a tuple: its own parameters are none of the model's

    def forward(self, x):
        for one in self.body:
            x = x + one(x)

        def by_head(weight, bias):
            return functional_call(self.head[0], {"weight": weight, "bias": bias}, (x,))

        x = vmap(by_head)(self.weight, self.bias).mean(0)
        return vmap(grad(lambda row: row.tanh().square().sum()))(x)


def train(model, budget=None):
    """Losses, the highest peak in MiB of all steps but the first, which runs plain to tell 50 % of what; the status."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fit = budget and lowtide.fit(model, budget=budget, optimizer=optimizer)
    numbers, losses, peaks = torch.Generator().manual_seed(0), [], []
    for _ in range(STEPS):
        x = torch.randn(512, WIDTH, generator=numbers)
        with measuring("cpu") as memory:
            loss = (model(x) - x).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        peaks.append(memory.peak / 2**20)
        if fit:
            fit.wait()  # a short example waits for its plan; a long training has it after some steps
    return losses, max(peaks[1:]), fit and fit.status()


torch.set_num_threads(1)
torch.manual_seed(0)
model = Ensemble()
losses, plain_mib, _ = train(copy.deepcopy(model))
found, mib, status = train(model, budget="50%")
print(status)
assert found == losses, "the bits are the same"
print(f"peak {plain_mib:.1f} MiB -> {mib:.1f} MiB, {status.planned_steps} of {STEPS} steps planned, losses identical")
