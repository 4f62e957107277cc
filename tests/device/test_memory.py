"""Statistics, capacity and the peak of an accelerator, on one that has an allocator and no memory."""

from types import SimpleNamespace

import pytest
import torch
from support.fake_allocator import FakeAllocator
from support.training_steps import mlp

import lowtide
from lowtide.device import memory
from lowtide.errors import DeviceError, LowtideError
from lowtide.measurement import allocator
from lowtide.measurement.allocator import peak_bytes
from lowtide.training.budget import StepBudget

MIB = 2**20


@pytest.fixture
def fake(monkeypatch):
    fake = FakeAllocator()
    fake.stand_in(monkeypatch)
    return fake


def test_a_peak_is_counted_above_the_start_and_the_users_is_given_back(fake):
    fake.allocate(100 * MIB)
    fake.free(fake.allocate(900 * MIB))

    with memory.counted_peak("meta") as counter:
        fake.free(fake.allocate(30 * MIB))
        fake.allocate(10 * MIB)
    assert fake.peak == 130 * MIB
    memory.give_back_peak("meta")

    assert (counter.peak, counter.left, counter.workspace) == (30 * MIB, 10 * MIB, 20 * MIB)
    assert (fake.peak, fake.now, fake.reserved) == (1000 * MIB, 110 * MIB, 1000 * MIB)


def test_a_peak_whose_memory_is_gone_is_not_paid_for(fake):
    fake.free(fake.allocate(1024 * MIB))
    fake.reserved = fake.now  # somebody emptied the cache

    with memory.counted_peak("meta"):
        pass
    memory.give_back_peak("meta")

    assert fake.reserved == 7 * MIB and fake.now == 0


def test_a_count_may_lie_in_another(fake):
    with memory.counted_peak("meta") as outer:
        kept = fake.allocate(2 * MIB)
        fake.free(fake.allocate(4 * MIB))
        with memory.counted_peak("meta") as inner:
            fake.free(fake.allocate(3 * MIB))
        fake.free(kept)

    assert (inner.peak, inner.left) == (3 * MIB, 0)
    assert (outer.peak, outer.left) == (6 * MIB, 0)
    assert peak_bytes(lambda: fake.free(fake.allocate(3 * MIB)), "meta") == 3 * MIB


def test_no_peak_of_the_user_is_lost_by_measuring_or_by_tracing(fake, monkeypatch):
    fake.free(fake.allocate(64 * MIB))

    peak_bytes(lambda: None, "meta")
    assert fake.peak == 64 * MIB
    for module in (allocator, memory):
        monkeypatch.setattr(module, "is_accelerator", lambda device: True)  # the CPU of this trace
    lowtide.trace(mlp(2, 8), torch.randn(4, 8))

    assert fake.resets > 1 and fake.peak == 64 * MIB


def test_what_can_be_allocated_is_free_or_held_unused(fake):
    fake.free(fake.allocate(100 * MIB))
    fake.allocate(40 * MIB)

    assert memory.available_bytes("meta") == fake.capacity - 40 * MIB
    assert memory.allocated_bytes("meta") == 40 * MIB
    assert memory.is_short_of(fake.capacity, "meta") and not memory.is_short_of(1, "meta")


def test_a_device_without_statistics_says_so_and_is_done_without(fake, monkeypatch):
    fake.tells = False

    assert memory.allocated_bytes("meta") is memory.available_bytes("meta") is None
    assert not memory.is_short_of(2**60, "meta")
    with memory.counted_peak("meta") as counter:
        pass
    assert counter is None
    with pytest.raises(LowtideError, match="cannot measure a peak on meta: its allocator keeps no statistics"):
        peak_bytes(lambda: None, "meta")
    monkeypatch.setattr("lowtide.training.budget.available_bytes", memory.available_bytes)
    monkeypatch.setattr(memory, "is_accelerator", lambda device: True)
    model = mlp(2, 8)
    with pytest.raises(DeviceError, match='does not say how much memory is free, so budget="auto" has no meaning'):
        StepBudget(model, "auto")
    assert StepBudget(model, "50%").for_step(model, ()) > 2**60


def test_memory_is_looked_at_on_the_device_that_is_meant(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(current_device_index=lambda: 1))
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", lambda index: asked.append(index) or {})

    memory.allocated_bytes(torch.device("meta", 3))
    memory.allocated_bytes("meta")

    assert asked == [3, 1]
