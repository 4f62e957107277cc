"""Where layers of a KV cache lie while they are away: a file for the CPU's, pinned host memory for an accelerator's.

A place is written when a layer has been used, and read one layer ahead. A thread reads the file. Copies to and
from pinned memory run on the device: out on the stream that made the keys, back on a stream of their own.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from lowtide.device.pinning import PinningError, host_buffer, pinned_buffer, unpin
from lowtide.device.streams import current_stream, new_event, new_stream, on_stream
from lowtide.errors import TierError
from lowtide.scratch_file import open_scratch, read_all, write_all


class Away:
    """A layer's keys and values that are away.

    Attributes:
        size: Their bytes.
        has_begun: They are on their way back.
    """

    def __init__(
        self, tensors: list[torch.Tensor], begin: Callable[[], None], take: Callable[[], list[torch.Tensor]]
    ) -> None:
        self.shapes = [tuple(x.shape) for x in tensors]
        self.size = sum(x.nbytes for x in tensors)
        self.has_begun = False
        self._begin, self._take = begin, take

    def begin(self) -> None:
        """Start to bring them back."""
        if not self.has_begun:
            self.has_begun = True
            self._begin()

    def take(self) -> list[torch.Tensor]:
        """Them, as they were. Raises: TierError: they cannot be read."""
        self.begin()
        return self._take()


class FilePlace:
    """A scratch file. Raises: TierError: the directory cannot be used."""

    def __init__(self, scratch_dir: str | Path | None) -> None:
        self._fd = open_scratch(scratch_dir)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="lowtide-kv")
        self._room: dict[int, tuple[int, int]] = {}  # by layer: offset and bytes in the file
        self._finalizer = weakref.finalize(self, _close, self._fd, self._reader)

    def write(self, index: int, tensors: list[torch.Tensor]) -> Away:
        """Write layer ``index``. Raises: TierError: the file cannot be written."""
        size = sum(x.nbytes for x in tensors)
        offset = os.fstat(self._fd).st_size
        room = 2 * size  # grown by doubling, so that the file stays within four times what it holds
        if self._room.get(index, (0, 0))[1] >= size:
            offset, room = self._room[index]
        at = offset
        try:
            os.truncate(self._fd, max(os.fstat(self._fd).st_size, offset + room))
            for x in tensors:
                write_all(self._fd, memoryview(x.view(-1).view(torch.uint8).numpy()), at)
                at += x.nbytes
        except OSError as error:
            raise TierError(f"the cache's scratch file cannot be written: {error.strerror or error}.") from error
        self._room[index] = (offset, room)
        kinds = [(tuple(x.shape), x.dtype) for x in tensors]
        coming: list[Future[list[torch.Tensor]]] = []

        def begin() -> None:
            coming.append(self._reader.submit(_read, self._fd, offset, kinds))

        def take() -> list[torch.Tensor]:
            try:
                return coming.pop().result()
            except OSError as error:
                raise TierError(f"the cache's scratch file cannot be read: {error.strerror or error}.") from error

        return Away(tensors, begin, take)


def _read(fd: int, at: int, kinds: list[tuple[tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
    found = []
    for shape, dtype in kinds:
        x = torch.empty(shape, dtype=dtype, device="cpu")
        read_all(fd, memoryview(x.view(-1).view(torch.uint8).numpy()), at)
        at += x.nbytes
        found.append(x)
    return found


def _close(fd: int, reader: ThreadPoolExecutor) -> None:
    reader.shutdown(wait=True, cancel_futures=True)
    os.close(fd)


class HostPlace:
    """Pinned host memory; pageable where the system gives none, which copies wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, new_stream(device)
        self._pinned: list[torch.Tensor] = []
        self._buffers: dict[int, torch.Tensor] = {}  # by layer
        self._finalizer = weakref.finalize(self, unpin, self._pinned)

    def write(self, index: int, tensors: list[torch.Tensor]) -> Away:
        """Copy layer ``index`` to the host, behind what makes it."""
        parts = self._parts(index, tensors)
        for part, x in zip(parts, tensors):
            part.copy_(x, non_blocking=True)
        written, arrived = new_event(self._device), new_event(self._device)
        written.record(current_stream(self._device))
        coming: list[torch.Tensor] = []

        def begin() -> None:
            self._stream.wait_event(written)
            with on_stream(self._stream):
                coming.extend(part.to(self._device, non_blocking=True) for part in parts)
                arrived.record(self._stream)

        def take() -> list[torch.Tensor]:
            user = current_stream(self._device)
            user.wait_event(arrived)
            for x in coming:
                x.record_stream(user)
            return coming

        return Away(tensors, begin, take)

    def _parts(self, index: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Host tensors like ``tensors``, in the layer's buffer."""
        size = sum(x.nbytes for x in tensors)
        buffer = self._buffers.get(index)
        if buffer is None or buffer.numel() < size:
            if buffer is not None and any(buffer is p for p in self._pinned):
                unpin([buffer])  # waits for the copies from it
                self._pinned[:] = [p for p in self._pinned if p is not buffer]
            buffer = self._buffers[index] = self._new(2 * size)
        sizes = [x.nbytes for x in tensors]
        return [part.view(x.dtype).view(x.shape) for part, x in zip(buffer[:size].split(sizes), tensors, strict=True)]

    def _new(self, size: int) -> torch.Tensor:
        try:
            self._pinned.append(pinned_buffer(size))
        except PinningError:
            return host_buffer(size)
        return self._pinned[-1]
