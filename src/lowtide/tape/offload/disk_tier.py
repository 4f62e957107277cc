"""The disk tier: storages of a model on CPU, in one scratch file.

The file is written and read, never mapped, because a mapping counts against an address-space limit. Each direction has
a thread of its own, so a store never waits for a fetch. The file has no name, so it disappears with the process.
"""

import errno
import math
import os
import threading
import weakref
import zlib
from bisect import insort
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from lowtide.device.dispatch import bytes_of, hidden_from_modes
from lowtide.device.pinning import host_buffer
from lowtide.errors import TierError
from lowtide.scratch_file import open_scratch, read_all, write_all
from lowtide.tape.offload.tiers import StoredCopy
from lowtide.units import format_bytes

_BLOCK = 4096  # every storage starts at a multiple of this


class DiskTier:
    """A scratch file of at most ``budget_bytes``, and two threads that write and read it. See ``Offload``.

    Raises:
        TierError: the directory cannot be used, or has less than ``need_bytes`` free.
    """

    def __init__(
        self, directory: str | Path | None = None, budget_bytes: float = math.inf, *, need_bytes: int = 0,
        checksums: bool = False,
    ) -> None:  # fmt: skip
        self.fd = open_scratch(directory, need_bytes)
        self.checksums = checksums
        self.space = _Space(budget_bytes)
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="lowtide-write")
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="lowtide-read")
        weakref.finalize(self, _close, self.fd, self.writer, self.reader)

    def store(self, storage: torch.UntypedStorage) -> StoredCopy:
        """Start to write ``storage``. Raises: TierError: the budget is used up."""
        return DiskCopy(self, storage)


class DiskCopy:
    """One storage in the file. See ``StoredCopy``."""

    def __init__(self, tier: DiskTier, storage: torch.UntypedStorage) -> None:
        self._tier, self._size = tier, storage.nbytes()
        self._offset = tier.space.allocate(self._size)
        self._original: torch.UntypedStorage | None = storage
        self._buffer: torch.Tensor | None = None
        self._reading: Future[None] | None = None
        self._sum: int | None = None
        self._writing = tier.writer.submit(_write, tier.fd, self._offset, storage, tier.checksums)
        free = partial(tier.space.free, self._offset, self._size)
        weakref.finalize(self, self._writing.add_done_callback, free)

    def settle(self) -> None:
        if self._original is not None:
            try:
                self._sum = self._writing.result()
            except OSError as error:
                raise _failed("written", self._size, error) from error
            self._original = None

    def start_fetch(self) -> None:
        if self._reading is None:
            self.settle()
            with hidden_from_modes():
                self._buffer = host_buffer(self._size)
            self._reading = self._tier.reader.submit(_read, self._tier.fd, self._offset, self._buffer, self._sum)

    def fetch(self) -> torch.Tensor:
        self.start_fetch()
        assert self._reading is not None and self._buffer is not None
        try:
            self._reading.result()
        except OSError as error:
            raise _failed("read", self._size, error) from error
        buffer, self._buffer, self._reading = self._buffer, None, None
        return buffer


class _Space:
    """Allocates the bytes of the file: first fit, and adjacent free ranges are merged."""

    def __init__(self, budget_bytes: float) -> None:
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()  # any thread may free
        self.end_bytes = 0  # where the last allocated range ends
        self._free: list[tuple[int, int]] = []  # offset, size; by offset

    def allocate(self, size: int) -> int:
        size = disk_bytes(size)
        with self._lock:
            for i, (offset, room) in enumerate(self._free):
                if room >= size:
                    self._free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                    return offset
            if self.end_bytes + size > self.budget_bytes:
                raise TierError(
                    f"the disk tier is full: disk_budget={format_bytes(self.budget_bytes)}, of which "
                    f"{format_bytes(self.end_bytes)} are in use or in pieces, and "
                    f"{format_bytes(size)} more are wanted.\n"
                    "Raise disk_budget=, or run backward before the next forward pass."
                )
            offset, self.end_bytes = self.end_bytes, self.end_bytes + size
            return offset

    def free(self, offset: int, size: int, _written: Future[int | None]) -> None:
        with self._lock:
            insort(self._free, (offset, disk_bytes(size)))
            joined: list[tuple[int, int]] = []
            for begin, room in self._free:
                if joined and sum(joined[-1]) == begin:
                    begin, room = joined[-1][0], joined.pop()[1] + room
                joined.append((begin, room))
            if joined and sum(joined[-1]) == self.end_bytes:
                self.end_bytes = joined.pop()[0]
            self._free = joined


def disk_bytes(size: int) -> int:
    """Bytes in the file for a storage of ``size`` bytes."""
    return -(-max(size, 1) // _BLOCK) * _BLOCK


# What the threads run must not refer to the tier: its finalizer waits for the threads.


def _write(fd: int, offset: int, storage: torch.UntypedStorage, checksum: bool) -> int | None:
    with hidden_from_modes():
        data = memoryview(bytes_of(storage).numpy())
    write_all(fd, data, offset)
    return zlib.crc32(data) if checksum else None


def _read(fd: int, offset: int, buffer: torch.Tensor, written: int | None) -> None:
    data = memoryview(buffer.numpy())
    read_all(fd, data, offset)
    if written is not None and zlib.crc32(data) != written:
        raise OSError(errno.EIO, f"the checksum of what came back from byte {offset} is not that of what was written")


def _failed(verb: str, size: int, error: OSError) -> TierError:
    way_out = "Make room there, or pass another directory with scratch_dir=."
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        way_out = "The device is not to be trusted: pass another directory with scratch_dir=."
    return TierError(
        f"the disk tier failed: {format_bytes(size)} could not be {verb}: {error.strerror or error}.\n"
        f"No gradient has been computed from them. {way_out}"
    )


def _close(fd: int, *pools: ThreadPoolExecutor) -> None:
    for pool in pools:
        pool.shutdown(wait=True)  # what still runs writes to this file
    os.close(fd)
