"""The allocator follows the rules of CUDA's, to the byte."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accelerator.schedules import EARLY, LATE

KIB, MIB = 1 << 10, 1 << 20


def some(count_bytes):
    return torch.empty(count_bytes, dtype=torch.uint8, device="standin")


def stats():
    """(allocated, requested, reserved, inactive split) bytes and (blocks, segments, inactive split blocks)."""
    found = torch.accelerator.memory_stats()
    names = ("allocated_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes")
    counts = ("allocation", "segment", "inactive_split")
    return tuple(found[f"{n}.all.current"] for n in names), tuple(found[f"{n}.all.current"] for n in counts)


def test_statistics_of_an_example_worked_by_hand(device):
    first = some(1000)  # two blocks of 512 of a small segment of 2 MiB
    assert stats() == ((KIB, 1000, 2 * MIB, 2 * MIB - KIB), (1, 1, 1))

    second = some(MIB)  # the largest that is small: from the same segment
    assert stats() == ((MIB + KIB, MIB + 1000, 2 * MIB, MIB - KIB), (2, 1, 1))

    third = some(MIB)  # what is left is too little: another small segment
    assert stats() == ((2 * MIB + KIB, 2 * MIB + 1000, 4 * MIB, 2 * MIB - KIB), (3, 2, 2))

    fourth = some(3 * MIB)  # a large segment of 20 MiB
    assert stats() == ((5 * MIB + KIB, 5 * MIB + 1000, 24 * MIB, 19 * MIB - KIB), (4, 3, 3))

    fifth = some(33 * MIB // 2)  # half a MiB would be left of 17: in the large pool that is not split off
    assert stats() == ((22 * MIB + KIB, 43 * MIB // 2 + 1000, 24 * MIB, 2 * MIB - KIB), (5, 3, 2))

    sixth = some(10 * MIB + 1)  # from 10 MiB a segment of its own, in steps of 2; the rest is split off
    assert stats() == ((32 * MIB + KIB + 512, 63 * MIB // 2 + 1001, 36 * MIB, 4 * MIB - KIB - 512), (6, 4, 3))

    del first, fourth
    assert stats() == ((29 * MIB - 0 + 512, 57 * MIB // 2 + 1 - 0, 36 * MIB, 7 * MIB - 512), (4, 4, 5))

    del second, third, fifth, sixth  # every block is whole again
    assert stats() == ((0, 0, 36 * MIB, 0), (0, 4, 0))
    assert torch.accelerator.max_memory_allocated() == 32 * MIB + KIB + 512

    torch.accelerator.empty_cache()
    assert stats() == ((0, 0, 0, 0), (0, 0, 0))


def test_the_unit_of_all_sizes_can_be_made_smaller(device):
    with device.allocator_unit(64 * KIB):
        kept = some(1)
        assert torch.accelerator.memory_reserved() == 128 * KIB
        del kept
        torch.accelerator.empty_cache()


def test_a_freed_block_is_taken_again_by_its_stream_and_by_no_other(device):
    first = some(4096)
    address = first.data_ptr()
    del first
    with torch.Stream(device="standin"):
        assert some(4096).data_ptr() != address

    assert some(4096).data_ptr() == address


def test_the_smallest_block_that_holds_it_is_taken(device):
    blocks = [some(n) for n in (4096, 512, 2048, 512)]
    middle = blocks[2].data_ptr()
    blocks[0] = blocks[2] = None

    assert some(1536).data_ptr() == middle


def test_memory_let_go_too_early_is_seen(device):
    """As on CUDA, work that is queued holds addresses: record_stream or a reference must keep the memory."""

    def copied(keep):
        side = torch.Stream(device="standin")
        source = torch.arange(1000, device="standin")
        target = torch.zeros(1000, dtype=torch.int64, pin_memory=True)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            target.copy_(source, non_blocking=True)
        if keep:
            source.record_stream(side)
        del source
        torch.accelerator.current_stream().synchronize()
        side.synchronize()
        return target

    with device.schedule(EARLY, LATE):
        assert copied(keep=True).equal(torch.arange(1000))
        assert copied(keep=False).view(torch.uint8).eq(0xFE).all()


def test_recorded_memory_is_active_until_the_other_stream_is_done(device):
    def active():
        return torch.accelerator.memory_stats()["active_bytes.all.current"]

    with device.schedule(EARLY, LATE):
        side = torch.Stream(device="standin")
        source = some(4096)
        with side:
            source.add_(1)
        source.record_stream(side)
        address = source.data_ptr()
        del source
        assert (torch.accelerator.memory_allocated(), active()) == (0, 4096)
        assert some(4096).data_ptr() != address
        side.synchronize()
        assert some(4096).data_ptr() == address


def test_new_memory_is_poisoned(device):
    assert some(1000).eq(0xFD).all()
    with device.poison(False):
        torch.accelerator.empty_cache()
        assert some(1000).eq(0).all()


def test_running_out_frees_the_cache_and_tries_again(device):
    with device.capacity(40 * MIB):
        del_me = some(30 * MIB)
        del del_me
        whole = some(40 * MIB)
        assert torch.accelerator.memory_stats()["num_alloc_retries"] == 1

        with pytest.raises(
            torch.OutOfMemoryError,
            match=r"Tried to allocate 2000 bytes.* capacity of 41943040 bytes, of which 41943040",
        ):
            some(2000)
        assert torch.accelerator.memory_stats()["num_ooms"] == 1
        assert torch.accelerator.get_memory_info() == (0, 40 * MIB)
        assert whole.fill_(3)[-1].item() == 3


def test_a_segment_that_grows_takes_pages_and_gives_whole_free_ones_back(device):
    with device.expandable_segments(True):
        first, second, third = some(9 * MIB), some(50 * MIB), some(MIB + 512)  # to 9, 59, 60 MiB and 512 bytes
        assert stats() == ((60 * MIB + 512, 60 * MIB + 512, 80 * MIB, 0), (3, 0, 0))  # CUDA counts no segment here

        address = second.data_ptr()
        del second
        torch.accelerator.empty_cache()  # the page from 20 to 40 goes; 0 to 20 and 40 to 60 are in use at one end
        assert torch.accelerator.memory_reserved() == 60 * MIB

        again = some(31 * MIB)  # from 9 on there is room for it, if that page is mapped again
        assert again.data_ptr() == address and torch.accelerator.memory_reserved() == 80 * MIB
        assert again.fill_(7).sum().item() == 7 * 31 * MIB

        small = some(512)
        assert torch.accelerator.memory_reserved() == 82 * MIB  # the small pool has a segment of its own
        del first, third, again, small
        torch.accelerator.empty_cache()
        assert stats() == ((0, 0, 0, 0), (0, 0, 0))


def test_the_end_that_can_grow_is_spared_where_another_block_holds_it(device):
    with device.expandable_segments(True):
        hole = some(8 * MIB)
        address = hole.data_ptr()
        kept = some(5 * MIB)  # 7 MiB are left at the end
        del hole
        assert some(6 * MIB).data_ptr() == address  # the end fits better, and could grow
        assert kept.nbytes == 5 * MIB


def test_blocks_of_a_segment_that_grows_are_left_alone_once_segments_do_not(device):
    with device.expandable_segments(True):
        kept = some(2 * MIB)
        address = kept.data_ptr()
    assert not address < some(2 * MIB).data_ptr() < address + 20 * MIB
    assert torch.accelerator.memory_reserved() == 40 * MIB


def test_pages_that_are_free_are_given_back_where_memory_runs_out(device):
    with device.expandable_segments(True), device.capacity(60 * MIB):
        freed, kept = some(40 * MIB), some(2 * MIB)
        with torch.Stream(device="standin"):
            with pytest.raises(torch.OutOfMemoryError):
                some(21 * MIB)  # two pages of another segment
            del freed
            taken = some(21 * MIB)
        assert torch.accelerator.memory_reserved() == 60 * MIB
        found = torch.accelerator.memory_stats()
        assert (found["num_alloc_retries"], found["num_ooms"]) == (2, 1)
        assert taken.nbytes + kept.nbytes == 23 * MIB


def test_an_emptied_storage_gives_its_memory_back(device):
    values = torch.arange(8.0, device="standin")
    storage, size = values.untyped_storage(), values.untyped_storage().nbytes()

    storage.resize_(0)
    assert torch.accelerator.memory_allocated() == 0
    storage.resize_(size)
    assert values.fill_(2).sum() == 16


def test_the_host_cannot_touch_device_memory(device):
    program = (
        "import ctypes, torch, accelerator.device\n"
        "x = torch.ones(4, device='standin')\n"
        "print(x.sum().item(), flush=True)\n"
        "ctypes.string_at(x.data_ptr(), 4)\n"
    )

    tests = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tests)

    assert (done.stdout, done.returncode) == ("4.0\n", -11)  # SIGSEGV
