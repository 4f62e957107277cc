"""Memory in pieces between blocks in use is made whole: storages move, and tensors over them see the same numbers."""

import gc

import pytest
import torch

from lowtide.device.packing import lay_together

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
    x = torch.ones(3)
    assert not lay_together([x.untyped_storage()], x.device)
