"""The allocator's model against examples worked by hand and against a map of its bytes."""

import pytest
from hypothesis import example, given
from support.allocations import play, traces

from lowtide.simulation.caching_allocator import CachingAllocator, expandable_segments_here

KIB, MIB = 1 << 10, 1 << 20


def test_statistics_of_an_example_worked_by_hand():
    memory = CachingAllocator()

    def stats():
        return memory.allocated_bytes, memory.reserved_bytes

    first = memory.allocate(1000)  # two blocks of 512 of a small segment
    assert stats() == (KIB, 2 * MIB)
    memory.allocate(MIB)  # the largest that is small: from the same segment
    assert stats() == (MIB + KIB, 2 * MIB)
    memory.allocate(MIB)  # what is left is too little: another small segment
    assert stats() == (2 * MIB + KIB, 4 * MIB)
    fourth = memory.allocate(3 * MIB)  # a large segment of 20 MiB
    assert stats() == (5 * MIB + KIB, 24 * MIB)
    memory.allocate(33 * MIB // 2)  # half a MiB would be left of 17: in the large pool that is not split off
    assert stats() == (22 * MIB + KIB, 24 * MIB)
    memory.allocate(10 * MIB + 1)  # from 10 MiB a segment of its own, in steps of 2; the rest is split off
    assert stats() == (32 * MIB + KIB + 512, 36 * MIB)
    memory.free(first)
    memory.free(fourth)
    memory.allocate(3 * MIB)  # where the first of that size was
    assert stats() == (32 * MIB + 512, 36 * MIB)


def test_fragments_are_reserved_and_of_no_use():
    """Two neighbours of 9 MiB, the first of them in use: 11 MiB are free in one piece, 12 need another segment."""
    memory = CachingAllocator()
    memory.allocate(9 * MIB)
    memory.free(memory.allocate(9 * MIB))
    memory.allocate(11 * MIB)
    assert memory.reserved_bytes == 20 * MIB
    memory.allocate(12 * MIB)
    assert memory.reserved_bytes == 32 * MIB


def test_a_segment_that_grows_takes_pages_for_what_its_free_end_lacks():
    memory = CachingAllocator(expandable_segments=True)
    memory.allocate(9 * MIB)  # a page of 20 MiB
    end = memory.allocate(10 * MIB)
    assert memory.reserved_bytes == 20 * MIB
    memory.free(end)
    memory.allocate(31 * MIB)  # 11 are there at the end: exactly a page more
    assert memory.reserved_bytes == 40 * MIB
    memory.allocate(512)  # the small pool's own segment, by pages of 2 MiB
    assert memory.reserved_bytes == 42 * MIB


def test_the_end_that_can_grow_is_spared_where_another_block_holds_it():
    memory = CachingAllocator(expandable_segments=True)
    hole = memory.allocate(8 * MIB)
    memory.allocate(5 * MIB)  # 7 MiB are left at the end
    memory.free(hole)
    taken = memory.allocate(6 * MIB)  # the end fits better, and could grow
    assert taken.address == hole.address


def grown_reserved(trace):
    """Reserved bytes after each change, of growing segments: from the used bytes of both pools, newly each time."""
    used = {True: {}, False: {}}  # by pool: address -> size
    mapped, found = {True: 0, False: 0}, []
    for block, size in trace:
        if size == 0:
            pool = next(p for p in used.values() if block in [b for b, _ in p.values()])
            del pool[next(at for at, (b, _) in pool.items() if b == block)]
        else:
            size = -(-size // 512) * 512
            small = size <= MIB
            edges = [0, *sorted(x for at, (_, n) in used[small].items() for x in (at, at + n)), mapped[small]]
            gaps = [(b - a, a) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
            fitting = sorted(gap for gap in gaps if gap[0] >= size)
            if fitting:
                at_end = sum(fitting[0]) == mapped[small]
                at = fitting[1 if at_end and len(fitting) > 1 else 0][1]
            else:
                at = next((a for n, a in gaps if a + n == mapped[small]), mapped[small])
                page = 2 * MIB if small else 20 * MIB
                mapped[small] += -(-(at + size - mapped[small]) // page) * page
            used[small][at] = block, size
        found.append(sum(mapped.values()))
    return found


@example([(0, MIB + 1), (1, 1), (2, 19 * MIB + 1), (3, 1), (4, 1)])  # large pages around a small one
@given(traces())
def test_growing_segments_hold_what_a_map_of_their_bytes_says(trace):
    assert [reserved for _, reserved in play(CachingAllocator(expandable_segments=True), trace)] == grown_reserved(
        trace
    )


@pytest.mark.parametrize(
    ("settings", "grows"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("expandable_segments:False,pinned_use_background_threads:True", False),
        ("backend:native, expandable_segments:True", True),
        ("backend:cudaMallocAsync", None),
        ("max_split_size_mb:128,expandable_segments:True", None),
        ("roundup_power2_divisions:[256:1,512:2]", None),
    ],
)
def test_settings_that_are_not_modelled_are_no_guess(monkeypatch, settings, grows):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    assert expandable_segments_here() is grows

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:1")
    assert expandable_segments_here() is grows or settings == ""
