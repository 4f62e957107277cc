"""The caching allocator of PyTorch's accelerators, simulated: what it reserves from the device for what is allocated.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings; other accelerators' allocators
were copied from it. Sizes are rounded up to blocks of 512 bytes. Blocks up to 1 MiB are cut from segments of 2 MiB,
others below 10 MiB from segments of 20 MiB, larger ones get a segment of their own in steps of 2 MiB. The smallest free
block that is large enough is taken, the lowest address first, and what is left of it is split off. Free neighbours in
a segment merge. A segment is never given back here: that happens where memory runs out.

With ``expandable_segments`` each pool has one segment that grows by pages of 2 MiB or 20 MiB, and splits always.

Not modelled: several streams, private pools of CUDA graphs, and the settings that change rounding or splitting.
"""

import os
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20  # most of a block of the small pool
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
OWN_SEGMENT_FROM_BYTES = 10 << 20
OTHER_ALLOCATORS = ("cpu", "meta", "mps")  # devices whose memory follows other rules

_MODELLED = {  # values of settings for which the rules above hold
    "backend": ("native",),
    "expandable_segments": ("true", "false"),
}
_OF_THE_HOST = ("pinned_", "release_lock_on_")


# One of a real allocator: its address, whether it is for small blocks, and bytes of each, and whether it is in use.
Segment = tuple[int, bool, Sequence[tuple[int, bool]]]


class Block:
    """A piece of a segment, in use or free."""

    __slots__ = ("address", "following", "preceding", "size", "small", "used")

    def __init__(self, address: int, size: int, small: bool, preceding: "Block | None" = None) -> None:
        self.address, self.size, self.small, self.used = address, size, small, False
        self.preceding: Block | None = preceding  # neighbours in the segment
        self.following: Block | None = None


class CachingAllocator:
    """One device's allocator, on one stream, from an empty start.

    Attributes:
        allocated_bytes: Blocks in use.
        reserved_bytes: Segments, or pages of growing ones: now and at most, since none is given back.
    """

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.expandable_segments = expandable_segments
        self.allocated_bytes = self.reserved_bytes = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # by pool: size and address, sorted
        self._free_at: dict[int, Block] = {}
        # By pool, far apart: a pool's growing segment is one range of addresses, whatever the other pool reserves.
        self._next_address = {True: 0, False: 1 << 62}
        self._last: dict[bool, Block] = {}  # by pool: the last block of its growing segment

    @classmethod
    def with_segments(cls, segments: Iterable[Segment]) -> "CachingAllocator":
        """One that holds what a real one holds, whose segments do not grow."""
        found = cls()
        found._next_address = {True: 1 << 61, False: 1 << 62}  # above what is there
        for start, small, blocks in segments:
            last: Block | None = None
            address = start
            for size, used in blocks:
                block = Block(address, size, small, last)
                block.used = used
                if last is not None:
                    last.following = block
                if used:
                    found.allocated_bytes += size
                else:
                    found._keep(block)
                address, last = address + size, block
            found.reserved_bytes += address - start
        return found

    def allocate(self, size: int) -> Block:
        """A block for ``size`` bytes, of which there is at least one."""
        size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        small = size <= SMALL_BYTES
        block = self._best_fit(size, small) or (
            self._grown(size, small) if self.expandable_segments else self._new_segment(size, small)
        )
        rest = block.size - size
        if rest >= BLOCK_BYTES if small or self.expandable_segments else rest > SMALL_BYTES:
            self._split(block, size)
        block.used = True
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block) -> None:
        """``block`` is free again, and one with its free neighbours."""
        block.used = False
        self.allocated_bytes -= block.size
        before, after = block.preceding, block.following
        if before is not None and not before.used:
            self._take(before)
            block = self._merged(before, block)
        if after is not None and not after.used:
            self._take(after)
            block = self._merged(block, after)
        self._keep(block)

    def _best_fit(self, size: int, small: bool) -> Block | None:
        free = self._free[small]
        at = bisect_left(free, (size, -1))
        if at == len(free):
            return None
        # A block that can grow counts as large as it can become, so a larger one that cannot is the better fit.
        if self.expandable_segments and self._free_at[free[at][1]] is self._last[small] and at + 1 < len(free):
            at += 1
        block = self._free_at[free[at][1]]
        self._take(block)
        return block

    def _new_segment(self, size: int, small: bool) -> Block:
        if small:
            size = SMALL_SEGMENT_BYTES
        elif size < OWN_SEGMENT_FROM_BYTES:
            size = LARGE_SEGMENT_BYTES
        else:
            size = -(-size // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
        return self._reserved(size, small)

    def _grown(self, size: int, small: bool) -> Block:
        """The end of the pool's growing segment, grown by as many pages as are missing."""
        page = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        last = self._last.get(small)
        there = 0 if last is None or last.used else last.size
        if there:
            assert last is not None
            self._take(last)
        grown = self._reserved(-(-(size - there) // page) * page, small)
        if last is not None:
            last.following, grown.preceding = grown, last
            if there:
                grown = self._merged(last, grown)
        self._last[small] = grown
        return grown

    def _reserved(self, size: int, small: bool) -> Block:
        block = Block(self._next_address[small], size, small)
        self._next_address[small] += size
        self.reserved_bytes += size
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.small, block)
        rest.following, block.following, block.size = block.following, rest, size
        if rest.following is not None:
            rest.following.preceding = rest
        if self._last.get(block.small) is block:
            self._last[block.small] = rest
        self._keep(rest)

    def _merged(self, first: Block, second: Block) -> Block:
        first.size += second.size
        first.following = second.following
        if second.following is not None:
            second.following.preceding = first
        if self._last.get(second.small) is second:
            self._last[second.small] = first
        return first

    def _keep(self, block: Block) -> None:
        insort(self._free[block.small], (block.size, block.address))
        self._free_at[block.address] = block

    def _take(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.address))]
        del self._free_at[block.address]


def expandable_segments_here() -> bool | None:
    """Whether this process has the allocator's segments grow; None where its settings are not modelled.

    The settings are read as PyTorch reads them: ``PYTORCH_ALLOC_CONF``, else the older name for CUDA.
    """
    text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_" + "CUDA_ALLOC_CONF") or ""
    grows = False
    for setting in filter(None, text.replace(" ", "").lower().split(",")):
        name, _, value = setting.partition(":")
        if name.startswith(_OF_THE_HOST):
            continue
        if value not in _MODELLED.get(name, ()):
            return None
        grows = value == "true" if name == "expandable_segments" else grows
    return grows
