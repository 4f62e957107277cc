"""The host tier against a stand-in for an accelerator that knows which stream may see what: no copy comes too early."""

import gc
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from support.offloads import movable, moving
from support.training_steps import differing, mlp, outcome, plain

import lowtide
from lowtide.device import block_size, pinning
from lowtide.errors import TierError
from lowtide.graph.costs import Costs, Link
from lowtide.tape.offload import host_tier
from lowtide.tape.offload.host_tier import HostTier, host_bytes
from lowtide.tape.offload.open_tiers import automatic_host_bytes, usable
from lowtide.tracing.tracer import run_step


class Race(AssertionError):
    """Two streams touch the same memory and neither waits for the other."""


class Gpu:
    """Streams, events, and for each piece of memory who touched it when."""

    def __init__(self) -> None:
        self.compute = self.now = SimpleNamespace(seen=set())
        self.touched: dict[int, list[tuple[int, bool]]] = {}
        self.count = 0
        self.pinned: dict[int, int] = {}
        self.pin_error = 0
        self.most_pinned = 0
        self.errors_cleared = 0

    def touch(self, address: int, *, writes: bool) -> None:
        """The current stream reads or writes what is at ``address``: everything it conflicts with must be over."""
        for earlier, wrote in self.touched.get(address, []):
            if (wrote or writes) and earlier not in self.now.seen:
                raise Race(f"access {earlier} to {address} is not waited for")
        self.count += 1
        self.now.seen.add(self.count)
        self.touched.setdefault(address, []).append((self.count, writes))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.touch(source.data_ptr(), writes=False)
        self.touch(target.data_ptr(), writes=True)
        target.copy_(source)

    # What host_tier.py uses of device/streams.py, and device/pinning.py of torch.cuda

    def new_stream(self, device):
        stream = SimpleNamespace(seen=set(), device=device)
        stream.wait_stream = lambda other: stream.seen.update(other.seen)
        stream.wait_event = lambda event: stream.seen.update(event.seen)
        return stream

    def new_event(self, device):
        event = SimpleNamespace(seen=set())
        event.record = lambda stream: event.seen.update(stream.seen)
        return event

    def current_stream(self, device):
        self.now.wait_event = lambda event, stream=self.now: stream.seen.update(event.seen)
        return self.now

    @contextmanager
    def on_stream(self, stream):
        before, self.now = self.now, stream
        yield
        self.now = before

    def synchronize_all(self):
        pass

    def cudart(self):
        def register(address, size, flags):
            if self.most_pinned and sum(self.pinned.values()) + size > self.most_pinned:
                return 2
            self.pinned[address] = size
            return self.pin_error

        def clear():
            self.errors_cleared += 1

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=self.pinned.pop, cudaGetLastError=clear)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(host_tier, "streams", gpu)
    monkeypatch.setattr(pinning, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(pinning, "cudart", lambda: gpu.cudart())
    monkeypatch.setattr(pinning, "synchronize_all", gpu.synchronize_all)
    monkeypatch.setattr(host_tier, "_copy", gpu.copy)
    yield gpu
    gc.collect()  # what this one has pinned is given back to no other


def made(gpu, seed=0, size=1000):
    """A storage that the compute stream has just written."""
    tensor = torch.randint(
        0, 255, (size,), dtype=torch.uint8, generator=torch.Generator(torch.get_default_device()).manual_seed(seed)
    )
    gpu.touch(tensor.data_ptr(), writes=True)
    return tensor


def test_a_storage_comes_back_bit_by_bit_in_memory_that_compute_may_read(gpu):
    tier, tensor = HostTier(), made(gpu)
    expected = tensor.clone()

    ticket = tier.store(tensor.untyped_storage())
    ticket.settle()
    ticket.start_fetch()
    back = ticket.fetch()

    gpu.touch(back.data_ptr(), writes=False)
    assert torch.equal(back, expected) and back.data_ptr() != tensor.data_ptr()


def test_memory_of_the_original_is_used_again_only_after_its_copy(gpu):
    tier, tensor = HostTier(), made(gpu)
    ticket = tier.store(tensor.untyped_storage())

    with pytest.raises(Race):
        gpu.touch(tensor.data_ptr(), writes=True)
    ticket.settle()

    gpu.touch(tensor.data_ptr(), writes=True)
    assert ticket._original is None


def test_a_copy_that_nobody_settles_is_waited_for_all_the_same(gpu):
    tier, tensor = HostTier(), made(gpu)
    ticket = tier.store(tensor.untyped_storage())
    del ticket
    gc.collect()

    gpu.touch(tensor.data_ptr(), writes=True)


def test_a_fetch_that_nobody_wants_is_waited_for_all_the_same(gpu):
    tier, tensor = HostTier(), made(gpu)
    ticket = tier.store(tensor.untyped_storage())
    ticket.start_fetch()
    address = ticket._buffer.data_ptr()
    with pytest.raises(Race):
        gpu.touch(address, writes=True)
    del ticket
    gc.collect()

    gpu.touch(address, writes=True)


def test_fetching_into_memory_waits_for_whoever_had_it_before(gpu, monkeypatch):
    tier, tensor = HostTier(), made(gpu)
    ticket = tier.store(tensor.untyped_storage())
    ticket.settle()
    reused = torch.empty(1000, dtype=torch.uint8)
    gpu.touch(reused.data_ptr(), writes=False)  # compute has only just been told to read it
    monkeypatch.setattr(host_tier.torch, "empty", lambda *a, **k: reused)

    ticket.fetch()


def test_pinned_memory_is_used_again_once_what_was_there_has_been_fetched(gpu):
    tier, one, two = HostTier(), made(gpu, 1), made(gpu, 2)
    expected = one.clone()
    ticket = tier.store(one.untyped_storage())
    back = ticket.fetch()
    del ticket
    gc.collect()

    ticket = tier.store(two.untyped_storage())

    assert len(gpu.pinned) == 1 and tier.pool.pinned_bytes == host_bytes(1000)
    assert torch.equal(back, expected) and torch.equal(ticket.fetch(), two)


def test_sizes_are_rounded_up_a_little_and_not_to_powers_of_two(gpu):
    assert host_bytes(33 * 2**20 + 1) == 33 * 2**20 + 2**16


def test_a_budget_that_is_used_up_is_named_with_numbers(gpu):
    tier = HostTier(2**16)
    held = tier.store(made(gpu).untyped_storage())

    with pytest.raises(TierError, match=r"host_budget=64.00 KiB, of which 64.00 KiB are pinned, and 64.00 KiB more"):
        tier.store(made(gpu).untyped_storage())
    assert held is not None


def test_memory_that_cannot_be_pinned_is_an_error_with_numbers(gpu):
    gpu.pin_error = 2

    with pytest.raises(TierError, match=r"64.00 KiB of host memory could not be pinned \(CUDA error 2\), 0 B are"):
        HostTier().store(made(gpu).untyped_storage())
    assert gpu.errors_cleared == 1  # or the next kernel would be blamed for it


def test_an_error_that_a_failed_registration_leaves_is_taken_away_by_older_torches_too(gpu, monkeypatch):
    gpu.pin_error = 2
    clearing = gpu.cudart()
    del clearing.cudaGetLastError
    gpu.cudart = lambda: clearing
    blamed = []

    def blames(*how, **options):
        blamed.append(options["device"])
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(pinning.torch, "ones", blames)

    with pytest.raises(TierError, match="could not be pinned"):
        HostTier().store(made(gpu).untyped_storage())
    assert blamed == ["cuda"]


def test_pinned_blocks_lie_on_pages_of_their_own(gpu):
    tier = HostTier()
    tier.reserve([1000, 70_000, 1, 2**20])

    spans = sorted(gpu.pinned.items())
    assert all(address % 4096 == 0 and size % 4096 == 0 for address, size in spans) and len(spans) == 4
    assert all(one + size <= two for (one, size), (two, _) in pairwise(spans))


def test_what_is_reserved_is_what_is_used(gpu):
    tier = HostTier()
    tier.reserve([1000, 1000])
    tickets = [tier.store(made(gpu, i).untyped_storage()) for i in range(2)]

    assert len(gpu.pinned) == 2 and tickets


def test_each_device_has_streams_of_its_own(gpu):
    tier = HostTier()

    one, other = (tier.streams(torch.device(name)) for name in ("cuda:0", "cuda:1"))

    assert [s.device.index for s in (*one, *other)] == [0, 0, 1, 1] and tier.streams(torch.device("cuda:0")) is one


def test_what_cuda_refuses_is_an_error_of_the_tier_and_running_out_of_device_memory_is_not(gpu, monkeypatch):
    def refused(target, source):
        raise RuntimeError("CUDA error: operation not supported\nmore of it")

    monkeypatch.setattr(host_tier, "_copy", refused)
    with pytest.raises(TierError, match="the host tier failed: CUDA error: operation not supported\n"):
        HostTier().store(made(gpu).untyped_storage())

    def full(target, source):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(host_tier, "_copy", full)
    with pytest.raises(torch.OutOfMemoryError):
        HostTier().store(made(gpu).untyped_storage())


# fit beside a stand-in for an accelerator


@pytest.fixture
def accelerator(gpu, monkeypatch):
    """A machine that takes its CPU for a GPU: ops that take a millisecond, a link that takes none."""

    monkeypatch.setattr("lowtide.training.rehearsal.measure", lambda graph, **_: Costs((1.0,) * len(graph.ops)))
    monkeypatch.setattr("lowtide.training.shared_tiers.measured_link", lambda *of: Link(1e12, 1e12))
    monkeypatch.setattr("lowtide.api.usable", lambda device, policy: usable("cuda", policy))
    monkeypatch.setattr("lowtide.tape.offload.open_tiers.check_tier", lambda tier, device: None)
    return gpu


def test_beside_an_accelerator_tensors_move_to_pinned_memory_without_being_asked_bit_by_bit(accelerator):
    model, batch = mlp(8, 64), torch.randn(512, 64)
    theirs = plain(model, batch)

    with lowtide.fit(model, batch, budget="40%") as fit:
        proof = fit.verify(batch, rounds=0)
        pinned = sum(accelerator.pinned.values())
        torch.manual_seed(7)
        loss, _ = run_step(model, batch, None)
        loss.backward()

    moved = [d.bytes for d in fit.plan.decisions if d.action == "cpu_offload"]
    assert moved and proof.equal and fit.warnings == []
    assert differing(theirs, outcome(model, loss)) == []
    # Once, whoever runs steps: fit, verify or training.
    assert pinned == sum(accelerator.pinned.values()) == sum(map(host_bytes, moved))


def test_plans_of_several_shapes_share_the_pinned_memory(accelerator):
    model, batch = mlp(8, 64), torch.randn(512, 64)

    with lowtide.fit(model, batch, budget="40%") as fit:
        before = dict(accelerator.pinned)
        fit.add(torch.randn(511, 64))
        tiers = {id(planned.tape.tiers["host"]) for planned in fit._lifecycle.plans_by_shape.plans}

    assert len(fit.plans) == 2 and len(tiers) == 1 and accelerator.pinned.keys() >= before.keys()
    assert sum(accelerator.pinned.values()) < 1.5 * sum(before.values())


@pytest.mark.parametrize("most_pinned", [1, 2**18])
def test_memory_that_cannot_be_pinned_leads_to_the_next_best_plan_and_a_warning_with_numbers(accelerator, most_pinned):
    model, batch = mlp(8, 64), torch.randn(512, 64)
    accelerator.most_pinned = most_pinned

    with lowtide.fit(model, batch, budget="50%") as fit:
        assert fit.verify(batch, rounds=0).equal

    assert fit.plan.tiers == frozenset() and fit.plan.counts["recompute"] > 0
    (warning,) = fit.warnings
    assert warning.startswith("planned without other tiers: 128.00 KiB of host memory could not be pinned (CUDA error")
    assert accelerator.errors_cleared
    del fit
    gc.collect()
    assert accelerator.pinned == {}


def test_none_moves_nothing_and_an_amount_that_was_asked_for_is_not_done_without(accelerator):
    model, batch = mlp(8, 64), torch.randn(512, 64)
    accelerator.most_pinned = 1

    with lowtide.fit(model, batch, budget="50%", offload=lowtide.Offload(host_budget=None)) as fit:
        assert fit.plan.tiers == frozenset() and fit.warnings == []
    with pytest.raises(TierError, match="could not be pinned"):
        lowtide.fit(model, batch, budget="50%", offload=lowtide.Offload(host_budget="1GiB"))


def test_what_is_taken_by_itself_is_a_share_of_what_is_free_split_among_ranks(monkeypatch):
    monkeypatch.setattr("lowtide.tape.offload.open_tiers.available_host_bytes", lambda: 800)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert automatic_host_bytes() == 400

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert automatic_host_bytes() == 50
    policy = lowtide.Offload()
    assert usable("cuda", policy) == {"host": 50} and usable("cpu", policy) == {}


def test_ops_whose_memory_the_allocator_rounds_up_are_dropped_and_moved_all_the_same(monkeypatch):
    monkeypatch.setattr(block_size, "block_bytes", lambda kind: 512)  # as CUDA's does
    model, batch = mlp(6, 9), torch.randn(7, 9)
    graph = lowtide.trace(model, batch)
    assert all(s.bytes % 512 == 0 for s in graph.storages)
    stored = movable(graph)
    plan = moving(graph, stored[::2], recomputed=stored[1::2])

    with lowtide.apply(model, plan) as applied:
        run_step(model, batch, None)[0].backward()

    assert applied.counts.mismatched == 0 and applied.counts.moved and applied.counts.dropped


def test_all_that_was_pinned_is_given_back(gpu):
    tier = HostTier()
    tickets = [tier.store(made(gpu, i).untyped_storage()) for i in range(3)]
    assert len(gpu.pinned) == 3
    del tickets, tier
    gc.collect()

    assert gpu.pinned == {}
