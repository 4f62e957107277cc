"""FSDP2 and DDP on PyTorch's CUDA build: two real processes, and rank 0 of 8 alone (cuda_standin/docs/ranks.md)."""

import contextlib
import gc

import pytest
import torch
import torch.distributed as dist
from support import ranks, sharded_training
from support.ranks import on_every_rank
from torch import nn
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.plan import RECOMPUTE

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this PyTorch has no CUDA device: make test-cuda makes one that needs no GPU"
)


@pytest.fixture
def on_cuda():
    """Ranks have the default device of the test that starts them."""
    with torch.device("cuda"):
        yield


@pytest.mark.thorough
def test_data_parallel_training_in_two_processes_is_bitwise_the_same(on_cuda):
    for told in on_every_rank(ranks.all_ways, ["gradients as views of buckets"]):
        plain = told["gradients as views of buckets", ""]
        for fitted in ("before", "after"):
            ours = told["gradients as views of buckets", fitted]
            assert all(ours[what] == plain[what] for what in ("losses", "gradients", "weights"))
            assert ours["dropped"] > 0 and ours["plan"].counts[RECOMPUTE] > 0


@pytest.mark.thorough
def test_sharded_training_in_two_processes_is_bitwise_the_same_within_the_budget(on_cuda):
    """Streams run late, and NCCL's group is PyTorch's own."""
    ways = ["mixed precision", "units in units"]
    for told in on_every_rank(sharded_training.all_ways, ways):
        for plain, ours in told.values():
            assert all(ours[what] == plain[what] for what in ("losses", "gradients", "state", "sent"))
            assert ours["equal"] and ours["dropped"] > 0 and ours["mismatched"] == 0
            assert ours["measured"] <= ours["predicted"]


@contextlib.contextmanager
def rank_0_of(world):
    process_group = pytest.importorskip("cuda_standin.process_group", reason="cuda_standin is not here: make test-cuda")
    with process_group.lone_rank(world):
        dist.init_process_group("nccl")
        yield


WIDTH, LAYERS, ROWS = 64, 6, 2048


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def sharded():
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS))).cuda()
    for layer in model:
        fully_shard(layer.down)  # a unit in a unit: it is gathered while the layer's own values wait to be proven
        fully_shard(layer)
    fully_shard(model)
    return model


def step(model, batch):
    """Gradients, and the bytes above what was there before, as the allocator counts them."""
    model.zero_grad()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(batch).square().mean().backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return (
        [p.grad.to_local().cpu() for p in model.parameters()],
        before,
        peak,
    )  # a copy there would count in later steps


def test_rank_0_of_8_trains_within_its_budget_and_bitwise_the_same():
    """Without a plan from the first step on, then under one; what is counted is what was predicted."""
    with rank_0_of(8):
        batch = torch.randn(ROWS, WIDTH, device="cuda")
        model = sharded()
        step(model, batch)  # workspaces of matrix products
        expected, before, plain_peak = step(model, batch)
        budget = int(before + 0.6 * (plain_peak - before))
        fit = lowtide.fit(model, budget=budget)
        watched, _, watched_peak = step(model, batch)
        fit.wait()
        planned, _, planned_peak = step(model, batch)
        status, plan = fit.status(), fit.plan
        fit.remove()
    assert status.planned_steps == 1 and plan.counts[RECOMPUTE] > 0
    assert all(map(torch.equal, watched, expected)) and all(map(torch.equal, planned, expected))
    assert planned_peak <= budget < plain_peak
    assert planned_peak == pytest.approx(plan.predicted_peak_bytes, rel=0.01)
    if watched_peak > 1.01 * budget:
        pytest.xfail(f"beside busy processes the watched step keeps everything now and then: {status.reasons}")
