"""Memory in pieces between blocks in use is made whole: storages move, and tensors over them see the same numbers."""

import gc

import pytest
import torch

from lowtide.device import packing
from lowtide.device.packing import lay_together, on_the_host
from lowtide.errors import LostMemoryError

MIB = 2**20


@pytest.fixture
def in_pieces(accelerator):
    """Three segments of 20 MiB, each with one block of 2 MiB in use at its start, and a device of no more."""
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    with accelerator.capacity(60 * MIB):
        blocks = [torch.empty(MIB // 2, device="standin") for _ in range(30)]
        kept = blocks[::10]
        for number, block in enumerate(kept):
            block.fill_(float(number))
        del blocks, block
        yield kept
        kept.clear()
        torch.accelerator.empty_cache()


def test_what_lies_in_pieces_fits_a_tensor_once_it_is_laid_together(in_pieces):
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(30 * MIB, dtype=torch.uint8, device="standin")
    views = [block[5:] for block in in_pieces]
    versions = [block._version for block in in_pieces]

    assert lay_together([block.untyped_storage() for block in in_pieces], in_pieces[0].device)

    torch.empty(30 * MIB, dtype=torch.uint8, device="standin")
    assert [block._version for block in in_pieces] == versions
    for number, (block, view) in enumerate(zip(in_pieces, views)):
        assert view.data_ptr() == block.data_ptr() + 20
        assert torch.equal(view.cpu(), torch.full((MIB // 2 - 5,), float(number)))


def test_what_is_free_becomes_one_segment_and_is_in_no_peak(in_pieces):
    """A tensor of 8 MiB has a place in the 20 that are free, though other segments for its like have as many."""
    taken = [torch.empty(14 * MIB, dtype=torch.uint8, device="standin") for _ in range(2)]
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.max_memory_allocated()

    assert lay_together([block.untyped_storage() for block in in_pieces], in_pieces[0].device)

    assert torch.accelerator.max_memory_allocated() == before == 34 * MIB
    small = torch.empty(8 * MIB, dtype=torch.uint8, device="standin")
    assert torch.accelerator.max_memory_allocated() == before + small.nbytes
    del taken


def test_nothing_moves_where_the_host_has_no_room(in_pieces, monkeypatch):
    monkeypatch.setattr("lowtide.device.packing.available_host_bytes", lambda: 6 * MIB)
    before = [block.data_ptr() for block in in_pieces]

    assert not lay_together([block.untyped_storage() for block in in_pieces], in_pieces[0].device)
    assert [block.data_ptr() for block in in_pieces] == before


def test_memory_of_the_host_stays_where_it_is():
    x = torch.ones(3, device="cpu")
    assert not lay_together([x.untyped_storage()], x.device)


@pytest.mark.parametrize("refusals", [1, 2])
def test_what_finds_no_place_is_laid_out_again_with_less_left_over(in_pieces, monkeypatch, refusals):
    """Before anything of it is lost: at last nothing is held, and only then it is said."""
    hold, asked = packing.hold_as_one_segment, []

    def refuse(device, *, tightly):
        asked.append(tightly)
        if len(asked) <= refusals:
            raise torch.OutOfMemoryError("no place")
        hold(device, tightly=tightly)

    monkeypatch.setattr(packing, "hold_as_one_segment", refuse)
    storages = [block.untyped_storage() for block in in_pieces]

    assert lay_together(storages, in_pieces[0].device)

    assert asked == [False, True]
    for number, block in enumerate(in_pieces):
        assert torch.equal(block.cpu(), torch.full((MIB // 2,), float(number)))


def test_where_somebody_took_the_place_the_error_says_so(in_pieces, accelerator):
    storage = in_pieces[1].untyped_storage()
    taken = []
    with pytest.raises(LostMemoryError, match="2097152 bytes that the step holds were moved to host memory"):
        with on_the_host(storage):
            torch.accelerator.empty_cache()
            while True:
                try:
                    taken.append(torch.empty(2 * MIB, dtype=torch.uint8, device="standin"))
                except torch.OutOfMemoryError:
                    break
    assert storage.nbytes() == 0
    del taken


def test_a_tensor_is_on_the_host_for_a_moment_and_its_memory_is_free(in_pieces):
    block, before = in_pieces[1], torch.accelerator.memory_allocated()

    with on_the_host(block.untyped_storage()) as copy:
        assert copy.nbytes() == 2 * MIB and str(copy.device) == "cpu"
        assert torch.accelerator.memory_allocated() == before - 2 * MIB

    assert torch.equal(block.cpu(), torch.full((MIB // 2,), 1.0))
