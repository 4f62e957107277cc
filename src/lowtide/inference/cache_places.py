"""Where layers of a KV cache lie while they are away: a file for the CPU's, pinned host memory for an accelerator's.

A place is written when a layer has been used, and read one layer ahead. A thread reads the file. Copies to and
from pinned memory run on the device: out on the stream that made the keys, back on a stream of their own.

Tokens come first there: ``(tokens, batch, heads, head_dim)``. So a token that is added goes to the end of what lies
there, alone, and a layer is read in one piece for each of its two tensors.
"""

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowtide.device.pinning import PinningError, host_buffer, pinned_buffer, unpin
from lowtide.device.streams import current_stream, new_event, new_stream, on_stream, why_no_streams
from lowtide.errors import TierError
from lowtide.scratch_file import open_scratch, read_all, write_all

logger = logging.getLogger("lowtide")
_AT_ONCE_BYTES = 1 << 22  # of a long prompt: so much is turned and written at a time


class Away:
    """A layer's keys and values that are away.

    Attributes:
        tokens: Of each sequence.
        size: Their bytes.
        written_bytes: Of these, what had to be written.
        has_begun: They are on their way back.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        kept: int,
        begin: Callable[[], None],
        take: Callable[[], list[torch.Tensor]],
    ) -> None:
        self.tokens = int(tensors[0].shape[2])
        self.size = sum(x.nbytes for x in tensors)
        self.written_bytes = self.size // self.tokens * (self.tokens - kept)
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
        return [x.permute(1, 2, 0, 3) for x in self._take()]


@dataclass
class _Room:
    """Room for ``capacity`` tokens of each tensor of a layer, one tensor after the other, ``at`` a place."""

    kinds: list[tuple[tuple[int, ...], torch.dtype]]  # of one token: shape and dtype
    capacity: int
    at: Any

    @property
    def size(self) -> int:
        return sum(self.capacity * _bytes(kind) for kind in self.kinds)

    def starts(self) -> list[int]:
        """Where each tensor begins."""
        return [sum(self.capacity * _bytes(kind) for kind in self.kinds[:i]) for i in range(len(self.kinds))]


class _Rooms:
    """By layer, room that holds its tensors; as long again as they are when it is made."""

    def __init__(self, new: Callable[[int, int], Any]) -> None:
        self._new, self._by_layer = new, dict[int, _Room]()

    def of(self, index: int, tensors: list[torch.Tensor], kept: int) -> tuple[_Room, int]:
        """(room for them, how many of ``kept`` tokens lie there)."""
        kinds: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((x.shape[0], x.shape[1], x.shape[3]), x.dtype) for x in tensors
        ]
        tokens = int(tensors[0].shape[2])
        room = self._by_layer.get(index)
        if room is None or room.kinds != kinds or room.capacity < tokens:
            room, kept = _Room(kinds, 2 * tokens, None), 0
            room.at = self._new(index, room.size)
            self._by_layer[index] = room
        return room, kept


def _bytes(kind: tuple[tuple[int, ...], torch.dtype]) -> int:
    (batch, heads, head_dim), dtype = kind
    return batch * heads * head_dim * dtype.itemsize


def _pieces(x: torch.Tensor, kept: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first token, what follows) of the tokens after ``kept``, tokens first."""
    step = max(1, _AT_ONCE_BYTES // max(1, x[:, :, 0].nbytes))
    for first in range(kept, x.shape[2], step):
        yield first, x[:, :, first : first + step].permute(2, 0, 1, 3).contiguous()


class FilePlace:
    """A scratch file. Raises: TierError: the directory cannot be used."""

    def __init__(self, scratch_dir: str | Path | None) -> None:
        self._fd = open_scratch(scratch_dir)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="lowtide-kv")
        self._rooms = _Rooms(lambda index, size: self._grown(size))
        self._finalizer = weakref.finalize(self, _close, self._fd, self._reader)

    def write(self, index: int, tensors: list[torch.Tensor], kept: int = 0) -> Away:
        """Write layer ``index``, of which ``kept`` tokens lie there. Raises: TierError: the file cannot be written."""
        try:
            room, kept = self._rooms.of(index, tensors, kept)
            for x, kind, start in zip(tensors, room.kinds, room.starts(), strict=True):
                for first, piece in _pieces(x, kept):
                    write_all(self._fd, _memory(piece), room.at + start + first * _bytes(kind))
        except OSError as error:
            raise TierError(f"the cache's scratch file cannot be written: {error.strerror or error}.") from error
        tokens = int(tensors[0].shape[2])
        coming: list[Future[list[torch.Tensor]]] = []

        def begin() -> None:
            coming.append(self._reader.submit(_read, self._fd, room, tokens))

        def take() -> list[torch.Tensor]:
            try:
                return coming.pop().result()
            except OSError as error:
                raise TierError(f"the cache's scratch file cannot be read: {error.strerror or error}.") from error

        return Away(tensors, kept, begin, take)

    def _grown(self, size: int) -> int:
        """Where ``size`` bytes more begin. Rooms grow by doubling: the file stays within four times what it holds."""
        end = os.fstat(self._fd).st_size
        os.truncate(self._fd, end + size)
        return end


def _read(fd: int, room: _Room, tokens: int) -> list[torch.Tensor]:
    found = []
    for (shape, dtype), start in zip(room.kinds, room.starts(), strict=True):
        x = torch.empty((tokens, *shape), dtype=dtype, device="cpu")
        read_all(fd, _memory(x), room.at + start)
        found.append(x)
    return found


def _memory(x: torch.Tensor) -> memoryview:
    return memoryview(x.view(-1).view(torch.uint8).numpy())


def _close(fd: int, reader: ThreadPoolExecutor) -> None:
    reader.shutdown(wait=True, cancel_futures=True)
    os.close(fd)


class HostPlace:
    """Pinned host memory; pageable where the system gives none, which copies wait for.

    Where the device copies nothing beside its computation, a layer that is away is brought when it is used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if why := why_no_streams(device.type):
            logger.warning("lowtide: %s has no streams (%s): layers that are away are waited for", device.type, why)
        self._stream = None if why else new_stream(device)
        self._pinned: list[torch.Tensor] = []
        self._buffers: dict[int, torch.Tensor] = {}  # by layer
        self._rooms = _Rooms(self._new)
        self._finalizer = weakref.finalize(self, unpin, self._pinned)

    def write(self, index: int, tensors: list[torch.Tensor], kept: int = 0) -> Away:
        """Copy layer ``index``, of which ``kept`` tokens lie there, to the host, behind what makes it."""
        room, kept = self._rooms.of(index, tensors, kept)
        tokens = int(tensors[0].shape[2])
        parts = [
            room.at[start : start + tokens * _bytes((shape, dtype))].view(dtype).view(tokens, *shape)
            for (shape, dtype), start in zip(room.kinds, room.starts(), strict=True)
        ]
        for part, x in zip(parts, tensors, strict=True):
            for first, piece in _pieces(x, kept):
                part[first : first + len(piece)].copy_(piece, non_blocking=self._stream is not None)
        if self._stream is None:
            return Away(tensors, kept, lambda: None, lambda: [part.to(self._device) for part in parts])
        begin, take = self._on_a_stream(self._stream, parts)
        return Away(tensors, kept, begin, take)

    def _on_a_stream(
        self, stream: torch.Stream, parts: list[torch.Tensor]
    ) -> tuple[Callable[[], None], Callable[[], list[torch.Tensor]]]:
        """How ``parts``, which are being written on the present stream, begin to come and are taken."""
        written, arrived = new_event(self._device), new_event(self._device)
        written.record(current_stream(self._device))
        coming: list[torch.Tensor] = []

        def begin() -> None:
            stream.wait_event(written)
            with on_stream(stream):
                coming.extend(part.to(self._device, non_blocking=True) for part in parts)
                arrived.record(stream)

        def take() -> list[torch.Tensor]:
            user = current_stream(self._device)
            user.wait_event(arrived)
            for x in coming:
                x.record_stream(user)
            return coming

        return begin, take

    def _new(self, index: int, size: int) -> torch.Tensor:
        old = self._buffers.pop(index, None)
        if old is not None and any(old is p for p in self._pinned):
            unpin([old])  # waits for the copies from it
            self._pinned[:] = [p for p in self._pinned if p is not old]
        try:
            buffer = pinned_buffer(size)
            self._pinned.append(buffer)
        except PinningError:
            buffer = host_buffer(size)
        self._buffers[index] = buffer
        return buffer
