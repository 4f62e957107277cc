"""A budget that is kept, or told: the peak of each step for a logger, and an error where a step takes more."""

import torch
from torch import nn

import lowtide
from lowtide.device.allocation_counter import prepare


def train(budget, noise_at=None):
    """Eight steps, and the status after each; step ``noise_at`` makes 64 MiB beside what the model makes."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, nhead=4, dim_feedforward=512, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(100, 128), nn.TransformerEncoder(layer, num_layers=4), nn.Linear(128, 100))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    logged = []  # in place of a logger of yours
    fit = lowtide.fit(model, budget=budget, optimizer=optimizer, on_excess="raise", on_status=logged.append)
    for n in range(8):
        tokens = torch.randint(0, 100, (16, 64))
        logits = model(tokens)
        noise = torch.randn((1 << 24) if n == noise_at else 1)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + 0 * noise.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fit.wait()  # a short example waits for its plan; a long training has it after some steps
    return logged


torch.set_num_threads(1)
prepare(waits=True)  # built beside the first training on a machine, within some seconds
plain_mib = train("1TiB")[-1].last_peak_bytes / 2**20
budget = int(0.8 * plain_mib) << 20
logged = train(budget)
print("logged:", *(f"{status.last_peak_bytes / 2**20:.1f}" for status in logged), "MiB")
mib = logged[-1].last_peak_bytes / 2**20
try:
    train(budget, noise_at=5)
except lowtide.BudgetExceededError as error:
    print(f"told: {str(error).splitlines()[0]}")
else:
    raise AssertionError("a step that took more than the budget went by")
print(f"peak {plain_mib:.1f} MiB -> {mib:.1f} MiB, {logged[-1].planned_steps} of 8 steps planned, the excess told")
