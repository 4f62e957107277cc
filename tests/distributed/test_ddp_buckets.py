"""DDP's buckets are there in every step, whether or not a gradient shows them."""

import pytest
import torch
import torch.distributed as dist
from support.watched_training import Layered, batch_of, peaks_by_the_tape, resident_bytes
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.measurement.allocator import peak_bytes, seen_on_cpu
from lowtide.step.data_parallel import unwrapped
from lowtide.training import budget as step_budget
from lowtide.training.budget import StepBudget

pytestmark = pytest.mark.usefixtures("one_thread", "process_group")


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("view", [True, False], ids=["gradients are views", "gradients of their own"])
def test_buckets_count_once(view):
    model = DistributedDataParallel(Layered(), gradient_as_bucket_view=view)
    size = resident_bytes(model)
    assert StepBudget(unwrapped(model), "1GiB").resident_bytes == 2 * size  # no gradient yet
    model(batch_of()).sum().backward()
    assert StepBudget(unwrapped(model), "1GiB").resident_bytes == (2 if view else 3) * size


def test_a_step_without_a_plan_leaves_room_for_them(monkeypatch):
    def highest() -> int:
        """Of two steps without a plan, beside the budget."""
        with seen_on_cpu():
            model = DistributedDataParallel(Layered(width=128), gradient_as_bucket_view=True)
        batch = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
        there = 2 * resident_bytes(model) + batch.nbytes
        budget = there + 3_000_000
        with lowtide.fit(model, budget=budget) as fit:
            fit._lifecycle.plans_by_shape.request = lambda *_, **__: None  # nobody plans
            peaks = []
            for _ in range(3):
                peaks.append(there + peak_bytes(lambda: model(batch).square().mean().backward()) - budget)
                model.zero_grad()
        return max(peaks[1:])

    assert highest() <= 0
    monkeypatch.setattr(step_budget, "unseen_bucket_bytes", lambda model: 0)
    assert highest() > 0


@pytest.mark.parametrize("view", [True, False], ids=["gradients are views", "gradients of their own"])
def test_what_backward_writes_into_them_is_not_counted_as_made(view, monkeypatch):
    model = DistributedDataParallel(Layered(width=128), gradient_as_bucket_view=view)
    batch = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    counted = peaks_by_the_tape(monkeypatch)

    with lowtide.fit(model, budget="1GiB") as fit:
        fit._lifecycle.plans_by_shape.request = lambda *_, **__: None  # nobody plans
        for _ in range(2):
            model.zero_grad()
            model.reducer._rebuild_buckets()  # once, after the first backward: no part of the step
            peak = peak_bytes(lambda: model(batch).square().mean().backward())
            assert counted.pop() == pytest.approx(peak, rel=0.01)
