"""Room that is asked for on a stream of somebody else's, as FSDP does for what it gathers."""

import gc

import pytest
import torch
from torch import nn

import lowtide
from lowtide.device.streams import current_stream
from lowtide.tape.online.online_values import Recipe

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this PyTorch has no CUDA device: make test-cuda makes one that needs no GPU"
)
WIDTH, ROWS = 64, 4096


class Beside(nn.Module):
    """Takes memory on a stream of its own, which waits for nothing."""

    def forward(self, x):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.empty(4 * ROWS * WIDTH, device="cuda")
        return x


def test_what_runs_again_runs_on_the_stream_of_the_step(monkeypatch):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), Beside()) for _ in range(6)]
    model = nn.Sequential(*blocks).cuda()
    batch = torch.randn(ROWS, WIDTH, device="cuda")

    def step():
        model.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(batch).square().mean().backward()
        torch.cuda.synchronize()
        return [p.grad.clone() for p in model.parameters()]

    step()  # workspaces of matrix products
    expected = step()
    peak, before = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    streams, run = [], Recipe.run

    def noting(recipe, transient):
        streams.append(current_stream(torch.device("cuda")))
        return run(recipe, transient)

    monkeypatch.setattr(Recipe, "run", noting)
    fit = lowtide.fit(model, budget=int(before + 0.4 * (peak - before)))
    found = step()
    fit.remove()
    assert all(map(torch.equal, found, expected))
    assert streams and set(streams) == {current_stream(torch.device("cuda"))}
