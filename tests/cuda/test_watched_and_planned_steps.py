"""What a fit says of its steps on CUDA is what PyTorch's own allocator and events say."""

import random

import pytest
import torch
from support.training_steps import mlp
from torch import nn

import lowtide
from lowtide.device import allocation_counter
from lowtide.device.memory import counted_peak, segments_of, unsplit_bytes
from lowtide.device.timing import Spans
from lowtide.hollow.kernels_here import unmeasured_workspace_bytes
from lowtide.simulation.caching_allocator import CachingAllocator
from lowtide.step.operators import fingerprint
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.online.room import ExpectedBytes
from lowtide.tape.planned_bytes import PlannedBytes
from lowtide.training import step_memory
from lowtide.training.step_memory import StepMemory

NO_HOST = lowtide.Offload(host_budget=None)


@pytest.fixture
def training(cuda):
    torch.manual_seed(0)
    model, batch = mlp(6, 256).to(cuda), torch.randn(4096, 256, device=cuda)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    step = lambda: model(batch).square().mean().backward()  # noqa: E731
    step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    activations = torch.cuda.max_memory_allocated() - before
    with lowtide.fit(model, budget=before + 7 * activations // 10, offload=NO_HOST) as fit:
        yield fit, step


def test_the_peaks_of_watched_and_planned_steps_are_the_allocators(training, monkeypatch):
    fit, step = training
    with monkeypatch.context() as nobody_plans:  # planning measures ops beside the comparison
        nobody_plans.setattr(fit._lifecycle.plans_by_shape, "request", lambda *_, **__: None)
        torch.cuda.reset_peak_memory_stats()
        step()
        assert fit.status().last_peak_bytes == torch.cuda.max_memory_allocated()
    step()
    fit.wait()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        step()
        assert fit.status().last_peak_bytes == torch.cuda.max_memory_allocated()
    status = fit.status()

    assert status.planned_steps == 2
    assert status.last_peak_bytes <= status.highest_peak_bytes == status.observed_peak_bytes <= status.budget_bytes


def test_a_planned_step_leaves_a_higher_peak_of_the_users(training):
    fit, step = training
    step()
    fit.wait()
    torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    before = torch.cuda.max_memory_allocated()
    step()

    assert torch.cuda.max_memory_allocated() == before > fit.status().last_peak_bytes
    assert fit.status().planned_steps == 1 and fit.status().reasons == ()


class Rows:
    """A batch whose sizes no signature shows."""

    def __init__(self, rows, device):
        self.x = torch.randn(rows, 256, device=device)


class OfRows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp(6, 256)

    def forward(self, rows):
        return self.layers(rows.x)


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_a_step_of_larger_sizes_leaves_a_plan_that_keeps_everything(cuda, is_looked_at, monkeypatch):
    allocation_counter.prepare(waits=True)
    if not is_looked_at:
        monkeypatch.setattr(StepMemory, "planned_bytes", lambda self, step: None)
    model = OfRows().to(cuda)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def peak(rows):
        batch = Rows(rows, cuda)
        torch.cuda.reset_peak_memory_stats()
        model(batch).square().mean().backward()
        return torch.cuda.max_memory_allocated()

    peak(4096)
    budget = int(1.05 * peak(4096))
    with lowtide.fit(model, budget=budget, offload=NO_HOST) as fit:
        for _ in range(3):
            peak(4096)
            fit.wait()
        assert fit.status().in_force and fit.plan.counts["recompute"] == 0
        assert (peak(6144) <= 1.02 * budget) == is_looked_at
        assert fit.status().plan_left_steps == is_looked_at


def test_ops_of_a_watched_step_are_timed_by_events_and_nobody_waits_for_them(training, monkeypatch):
    fit, step = training
    recorded = []
    end = Spans.end
    monkeypatch.setattr(Spans, "end", lambda *args: recorded.append(end(*args)) or recorded[-1])
    for module in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(module, "synchronize", lambda *_: pytest.fail("the step waits for the device"))
    step()
    steps = fit.status().steps
    monkeypatch.undo()
    fit.wait()

    assert steps == 1 and len(recorded) >= len(fit.graph.ops)
    assert all(span.begin is not None and span.ms() >= 0 for span in recorded)
    assert all(ms >= 0 for ms in fit.costs.op_ms) and sum(fit.costs.op_ms) > 0
    assert fit.status().reasons == ()


@pytest.mark.parametrize("size", [1, 8, 4097 * 8, 1 << 23, (1 << 26) + 24])
def test_a_fingerprint_takes_little_memory_and_shows_a_swap(cuda, size):
    tensor = torch.arange(size, device=cuda).to(torch.uint8)
    tensor[-1] = 255
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = fingerprint(tensor)

    assert torch.cuda.max_memory_allocated() - before <= 1 << 15
    assert fingerprint(tensor) == found
    tensor[0], tensor[-1] = tensor[-1].clone(), tensor[0].clone()
    assert size == 1 or fingerprint(tensor) != found


@pytest.mark.parametrize("columns", [128, 1088])
def test_a_workspace_is_foreseen_and_is_what_was_asked_for_whatever_block_it_got(cuda, columns):
    """17 MiB for the parts of the sum are given 18, of which the last one is not split off."""
    rows = torch.zeros(2048, columns, device=cuda)
    torch.cuda.empty_cache()
    with counted_peak(cuda) as counter:
        total = torch.ops.aten.sum.dim_IntList(rows, [0], True)

    assert counter.workspace == unmeasured_workspace_bytes(torch.ops.aten.sum.dim_IntList, (rows, [0], True), cuda)
    assert (counter.peak - counter.left > counter.workspace) == (columns == 1088)
    assert total.shape == (1, columns)


@pytest.mark.parametrize("looks", [True, False])
def test_steps_without_a_plan_leave_free_what_blocks_do_not_split_off(cuda, looks, monkeypatch):
    """Blocks of 1 to 10 MiB: up to 1 MiB of each counts and is nobody's."""
    if not looks:
        monkeypatch.setattr(OnlineTape, "_unsplit_bytes", lambda self, held_bytes=0: 0)
    torch.manual_seed(0)
    layer = lambda: nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)  # noqa: E731
    model, batch = nn.Sequential(*(layer() for _ in range(4))).to(cuda), torch.randn(16, 128, 128, device=cuda)

    def peak() -> int:
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        model(batch).square().mean().backward()
        return torch.cuda.max_memory_allocated()

    plain = max(peak() for _ in range(2))
    model.zero_grad()
    budget = torch.cuda.memory_allocated() + (plain - torch.cuda.memory_allocated()) * 4 // 10
    with lowtide.fit(model, budget=budget, offload=NO_HOST) as fit:
        monkeypatch.setattr(fit._lifecycle.plans_by_shape, "request", lambda *_, **__: None)
        peaks = [peak() for _ in range(3)]
    assert (max(peaks) <= budget) == looks


def test_a_block_that_is_handed_out_whole_counts_as_unsplit(cuda):
    before = unsplit_bytes(cuda)
    torch.empty(20 << 20, dtype=torch.uint8, device=cuda)  # is free again at once
    held = torch.empty((20 << 20) - (1 << 19), dtype=torch.uint8, device=cuda)

    assert unsplit_bytes(cuda) - before == 1 << 19
    del held


def test_a_planned_step_is_told_what_nobody_asked_for(training, monkeypatch):
    fit, step = training
    told, begin = [], PlannedBytes.begin_step

    def begin_step(self, most, now, unsplit):
        told.append(unsplit)
        begin(self, most, now, unsplit)

    monkeypatch.setattr(PlannedBytes, "begin_step", begin_step)
    step()
    fit.wait()
    step()

    assert fit.status().planned_steps == 1
    assert told[-1]() == unsplit_bytes("cuda")


def test_room_for_a_sum_over_rows_is_asked_for_after_a_sum_that_took_nothing(cuda):
    x, total = torch.randn(2048, 512, device=cuda), torch.ops.aten.sum.dim_IntList
    expected = ExpectedBytes()
    taken = []
    for dims in ([1], [0]):
        assert expected.needs[total].at_most(x.nbytes, [x]) == float("inf")
        key = expected.key(total, (x, dims, True))
        foreseen = expected.of(key, total, (x, dims, True), {})
        with counted_peak(cuda) as counter:
            result = total(x, dims, True)
        assert foreseen == counter.peak
        expected.learn(key, counter.left)
        expected.needs[total].note(x.nbytes, counter.peak)
        taken.append(counter.peak)
        del result

    assert taken[1] > 100 * taken[0]
    assert expected.needs[total].at_most(x.nbytes, [x.cpu()]) < float("inf")


@pytest.mark.parametrize("seed", range(3))
def test_a_simulated_allocator_that_holds_what_the_real_one_holds_goes_on_like_it(cuda, seed):
    numbers = random.Random(seed)

    def size() -> int:
        low, high = numbers.choice([(1, 1 << 20), (1 << 20, 10 << 20), (10 << 20, 40 << 20)])
        return numbers.randrange(low, high)

    def make(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=cuda)

    before = [make(size()) for _ in range(100)]
    del before[::2]
    simulated = CachingAllocator.with_segments(segments_of(cuda))
    held, blocks = [], []
    for _ in range(200):
        if held and numbers.random() < 0.5:
            at = numbers.randrange(len(held))
            held.pop(at)
            simulated.free(blocks.pop(at))
        else:
            asked = size()
            held.append(make(asked))
            blocks.append(simulated.allocate(asked))
        assert simulated.allocated_bytes == torch.cuda.memory_allocated()
    assert simulated.reserved_bytes == torch.cuda.memory_reserved()


@pytest.mark.parametrize("looks", [True, False])
def test_a_plans_counted_peak_is_foreseen_from_the_blocks_that_are_free(training, looks, monkeypatch):
    if not looks:
        monkeypatch.setattr(step_memory, "segments_of", lambda device: None)
    fit, step = training
    torch.cuda.empty_cache()
    sizes = (39 << 17, 9 << 17)  # the first is free for a tensor of 4 MiB, which then counts 0.9 MiB more
    hole, held = (torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes)
    del hole
    step()
    fit.wait()
    torch.cuda.reset_peak_memory_stats()
    step()

    assert fit.status().planned_steps == 1
    off = torch.cuda.max_memory_allocated() - fit.plan.measurable_peak_bytes
    assert (abs(off) <= 1 << 16) == looks
    del held
