"""The host tier against a stand-in for ``torch.cuda`` that knows which stream may see what: no copy comes too early."""

import gc
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from lowtide.errors import TierError
from lowtide.tape import host
from lowtide.tape.host import HostTier, host_bytes


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

    # What host.py uses of torch.cuda

    def Stream(self, device):
        stream = SimpleNamespace(seen=set())
        stream.wait_stream = lambda other: stream.seen.update(other.seen)
        stream.wait_event = lambda event: stream.seen.update(event.seen)
        return stream

    def Event(self):
        event = SimpleNamespace(seen=set())
        event.record = lambda stream: event.seen.update(stream.seen)
        return event

    def current_stream(self, device):
        self.now.wait_event = lambda event, stream=self.now: stream.seen.update(event.seen)
        return self.now

    @contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        yield
        self.now = before

    def synchronize(self):
        pass

    def cudart(self):
        def register(address, size, flags):
            self.pinned[address] = size
            return self.pin_error

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=self.pinned.pop)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(host, "cuda", gpu)
    monkeypatch.setattr(host, "_copy", gpu.copy)
    return gpu


def made(gpu, seed=0, size=1000):
    """A storage that the compute stream has just written."""
    tensor = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    gpu.touch(tensor.data_ptr(), writes=True)
    return tensor


def test_a_storage_comes_back_bit_by_bit_in_memory_that_compute_may_read(gpu):
    tier, tensor = HostTier(torch.device("cpu")), made(gpu)
    expected = tensor.clone()

    ticket = tier.store(tensor.untyped_storage())
    ticket.settle()
    ticket.start()
    back = ticket.fetch()

    gpu.touch(back.data_ptr(), writes=False)
    assert torch.equal(back, expected) and back.data_ptr() != tensor.data_ptr()


def test_memory_of_the_original_is_used_again_only_after_its_copy(gpu):
    tier, tensor = HostTier(torch.device("cpu")), made(gpu)
    ticket = tier.store(tensor.untyped_storage())

    with pytest.raises(Race):
        gpu.touch(tensor.data_ptr(), writes=True)
    ticket.settle()

    gpu.touch(tensor.data_ptr(), writes=True)
    assert ticket._original is None


def test_a_copy_that_nobody_settles_is_waited_for_all_the_same(gpu):
    tier, tensor = HostTier(torch.device("cpu")), made(gpu)
    ticket = tier.store(tensor.untyped_storage())
    del ticket
    gc.collect()

    gpu.touch(tensor.data_ptr(), writes=True)


def test_a_fetch_that_nobody_wants_is_waited_for_all_the_same(gpu):
    tier, tensor = HostTier(torch.device("cpu")), made(gpu)
    ticket = tier.store(tensor.untyped_storage())
    ticket.start()
    address = ticket._buffer.data_ptr()
    with pytest.raises(Race):
        gpu.touch(address, writes=True)
    del ticket
    gc.collect()

    gpu.touch(address, writes=True)


def test_fetching_into_memory_waits_for_whoever_had_it_before(gpu, monkeypatch):
    tier, tensor = HostTier(torch.device("cpu")), made(gpu)
    ticket = tier.store(tensor.untyped_storage())
    ticket.settle()
    reused = torch.empty(1000, dtype=torch.uint8)
    gpu.touch(reused.data_ptr(), writes=False)  # compute has only just been told to read it
    monkeypatch.setattr(host.torch, "empty", lambda *a, **k: reused)

    ticket.fetch()


def test_pinned_memory_is_used_again_once_what_was_there_has_been_fetched(gpu):
    tier, one, two = HostTier(torch.device("cpu")), made(gpu, 1), made(gpu, 2)
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
    tier = HostTier(torch.device("cpu"), 2**16)
    held = tier.store(made(gpu).untyped_storage())

    with pytest.raises(TierError, match=r"host_budget=64.00 KiB, of which 64.00 KiB are pinned, and 64.00 KiB more"):
        tier.store(made(gpu).untyped_storage())
    assert held is not None


def test_memory_that_cannot_be_pinned_is_an_error_with_numbers(gpu):
    gpu.pin_error = 2

    with pytest.raises(TierError, match=r"64.00 KiB of host memory could not be pinned \(CUDA error 2\), 0 B are"):
        HostTier(torch.device("cpu")).store(made(gpu).untyped_storage())


def test_all_that_was_pinned_is_given_back(gpu):
    tier = HostTier(torch.device("cpu"))
    tickets = [tier.store(made(gpu, i).untyped_storage()) for i in range(3)]
    assert len(gpu.pinned) == 3
    del tickets, tier
    gc.collect()

    assert gpu.pinned == {}
