"""Training on the device is training on the CPU, bit for bit, on every schedule."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from accelerator.schedules import SCHEDULES, schedule_name


def mlp():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5)), torch.randn(6, 8)


def convolutional():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)]
    return nn.Sequential(*layers), torch.randn(6, 3, 8, 8)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens):
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.layers(self.embedding(tokens), mask=causal)[:, -1])


def transformer():
    return Transformer(), torch.randint(0, 11, (6, 7))


def train(model, batch, steps=3):
    """The losses and the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    target = torch.arange(6, device=batch.device) % 5
    losses = []
    for _ in range(steps):
        loss = cross_entropy(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        losses.append(loss.detach())
    return [t.detach().cpu() for t in (*losses, *model.state_dict().values())]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=schedule_name)
@pytest.mark.parametrize("make", [mlp, convolutional, transformer], ids=lambda make: make.__name__)
def test_training_is_that_of_the_cpu(device, make, schedule):
    torch.manual_seed(0)
    model, batch = make()
    theirs = train(copy.deepcopy(model), batch)

    with device.schedule(*schedule):
        ours = train(copy.deepcopy(model).to("standin"), batch.to("standin"))

    assert all(map(torch.equal, theirs, ours)), max((a - b).abs().max() for a, b in zip(theirs, ours, strict=True))
