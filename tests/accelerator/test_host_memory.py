"""Pinned host memory: what it is, how much there may be, and that copies keep it."""

import mmap

import pytest
import torch

from accelerator.schedules import EARLY, LATE

PAGE = 4096


@pytest.fixture
def pages():
    """The address of four pages of host memory."""
    memory = mmap.mmap(-1, 4 * PAGE)
    yield torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def test_pinned_memory_has_a_limit(device):
    before = device.pinned_bytes()
    with device.pin_limit(before + 2 * PAGE):
        values = torch.zeros(PAGE + 1, dtype=torch.uint8, pin_memory=True)
        assert values.is_pinned() and device.pinned_bytes() == before + 2 * PAGE
        with pytest.raises(RuntimeError, match="cannot pin 4096 bytes"):
            torch.zeros(1, pin_memory=True)
        del values
        assert torch.zeros(1).pin_memory().is_pinned()
    assert device.pinned_bytes() == before


def test_registered_memory_is_pinned_within_the_same_limit(device, pages):
    with device.pin_limit(device.pinned_bytes() + 2 * PAGE):
        assert device.host_register(pages, 3 * PAGE) == 2  # cudaErrorMemoryAllocation
        assert device.host_register(pages, 2 * PAGE) == 0
        assert device.host_register(pages + 2 * PAGE - 1, 1) == 712  # cudaErrorHostMemoryAlreadyRegistered
        assert device.host_unregister(pages) == 0
        assert device.host_unregister(pages) == 713  # cudaErrorHostMemoryNotRegistered


def test_unregistering_under_a_queued_copy_is_counted(device):
    host = torch.zeros(PAGE, dtype=torch.uint8)
    values = torch.ones(PAGE, dtype=torch.uint8, device="standin")
    assert device.host_register(host.data_ptr(), PAGE) == 0
    with device.schedule(LATE, LATE):
        host.copy_(values, non_blocking=True)
        before = device.unregistered_in_use()
        device.host_unregister(host.data_ptr())
        assert device.unregistered_in_use() == before + 1


def test_pinned_memory_that_is_let_go_stays_until_its_copies_are_done(device):
    before = device.pinned_bytes()
    with device.schedule(EARLY, LATE):
        side = torch.Stream("standin")
        target = torch.zeros(PAGE, dtype=torch.uint8, device="standin")
        host = torch.full((PAGE,), 7, dtype=torch.uint8, pin_memory=True)
        with side:
            target.copy_(host, non_blocking=True)
        del host
        other = torch.zeros(PAGE, dtype=torch.uint8, pin_memory=True)
        assert device.pinned_bytes() == before + 2 * PAGE
        side.synchronize()
        del other
        assert device.pinned_bytes() == before
        assert target.eq(7).all()


def test_a_copy_from_pinned_memory_reads_it_when_it_runs_and_another_at_once(device):
    def copied(host):
        with device.schedule(LATE, LATE):
            values = host.to("standin", non_blocking=True)
            host.fill_(2)
            return values.cpu()

    assert copied(torch.ones(4)).equal(torch.ones(4))
    assert copied(torch.ones(4, pin_memory=True)).equal(torch.full((4,), 2.0))


def test_a_copy_out_to_pageable_memory_waits(device):
    values = torch.ones(4, device="standin")
    with device.schedule(LATE, LATE):
        assert values.add(1).to("cpu", non_blocking=False).equal(torch.full((4,), 2.0))
