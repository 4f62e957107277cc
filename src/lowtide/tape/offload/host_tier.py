"""The host tier: storages of a model on an accelerator in pinned host memory, copied on streams of their own.

Never run on a GPU. The tests run it on an accelerator of their own, where a wait that is missing gives wrong bytes.

- Stores and fetches have a stream each. Nothing synchronises: an event is recorded after each copy, and the stream that
  needs the copy waits for that event.
- The caching allocator gives freed memory to the next allocation on the same stream. So an offloaded storage is
  released only after the stream that it was copied from waits for its copy. Memory to fetch into is allocated on the
  stream that is current then, and the fetch stream waits for that stream first. So where a step runs on one stream, no
  ``record_stream`` is needed, and the moment at which memory is free does not depend on the speed of copies. Where
  another stream asks for what was fetched, that one waits as well, and ``record_stream`` notes that it reads the
  memory.
- Pinned memory comes from a pool, in blocks of 64 KiB and more (``device/pinning.py``). A storage takes the smallest
  block that is large enough. The pool grows up to the budget and is kept until the tier is closed. What a plan offloads
  is pinned when the tier is opened, so a failure shows before the first step.
"""

import math
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from lowtide.device import pinning, streams, values_off
from lowtide.device.dispatch import bytes_of, hidden_from_modes
from lowtide.errors import TierError
from lowtide.tape.offload.tiers import StoredCopy
from lowtide.units import format_bytes

_ROUNDING = 1 << 16


class HostTier:
    """Pinned memory, at most ``budget_bytes`` of it, and for each device the streams to and from it."""

    def __init__(self, budget_bytes: float = math.inf) -> None:
        self.pool = _Pool(budget_bytes)
        self._streams: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}
        weakref.finalize(self, self.pool.close)

    def streams(self, device: torch.device) -> tuple[torch.Stream, torch.Stream]:
        """The streams of stores and of fetches on ``device``, which need not be the current one."""
        if device not in self._streams:
            self._streams[device] = streams.new_stream(device), streams.new_stream(device)
        return self._streams[device]

    def reserve(self, sizes: Iterable[int]) -> None:
        """Pin memory for storages of ``sizes``, all together. Raises: TierError: see ``store``."""
        self.pool.reserve(sizes)

    def store(self, storage: torch.UntypedStorage) -> StoredCopy:
        """Start to copy ``storage``. Raises: TierError: the budget is used up, or memory cannot be pinned."""
        return HostCopy(self, storage)


class HostCopy:
    """One storage in pinned memory. See ``StoredCopy``."""

    def __init__(self, tier: HostTier, storage: torch.UntypedStorage) -> None:
        self._device, self._size = storage.device, storage.nbytes()
        self._tier = tier  # keeps the streams and the pool alive
        self._block = tier.pool.allocate(self._size)
        weakref.finalize(self, tier.pool.free, self._block)
        with hidden_from_modes():
            self._original: torch.Tensor | None = bytes_of(storage)
        self._buffer: torch.Tensor | None = None
        out, _ = tier.streams(self._device)
        with _as_tier_error():
            if self._block.last_read is not None:
                out.wait_event(self._block.last_read)  # an earlier storage in this block may still be read
        self._wait_for_store, _ = self._start(out, self._block.memory[: self._size], self._original)

    def settle(self) -> None:
        if self._original is not None:
            self._wait_for_store()
            self._original = None

    def start_fetch(self) -> None:
        if self._buffer is not None:
            return
        self.settle()
        _, back = self._tier.streams(self._device)
        self._buffer_stream = streams.current_stream(self._device)
        with hidden_from_modes():
            self._buffer = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        memory = self._block.memory[: self._size]
        self._wait_for_fetch, self._block.last_read = self._start(back, self._buffer, memory)

    def fetch(self) -> torch.Tensor:
        self.start_fetch()
        assert self._buffer is not None
        self._wait_for_fetch()
        buffer, self._buffer = self._buffer, None
        reader = streams.current_stream(self._device)
        if reader != self._buffer_stream:
            buffer.record_stream(reader)
        return buffer

    def _start(
        self, stream: torch.Stream, target: torch.Tensor, source: torch.Tensor
    ) -> tuple[weakref.finalize, torch.Event]:
        """Copy on ``stream``. Returns a call that makes the current stream wait for the copy, and the copy's event."""
        owner = streams.current_stream(self._device)
        with _as_tier_error():
            # For the op that makes the storage, for earlier users of the memory, and for the store before a fetch.
            stream.wait_stream(owner)
            with hidden_from_modes(), streams.on_stream(stream):
                _copy(target, source)
                copied = streams.new_event(self._device)
                copied.record(stream)
        # A finalizer waits also if nobody asks for the copy: the stream that the memory belongs to reuses it.
        wait = weakref.finalize(self, _wait, self._device, owner, copied)
        wait.atexit = False
        return wait, copied


@contextmanager
def _as_tier_error() -> Iterator[None]:
    """Turn the device's errors into TierError, so that ``fit`` can plan without this tier; not a full device."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise TierError(
            f"the host tier failed: {str(error).splitlines()[0]}\nLeave host_budget= out, or pass None."
        ) from error


@values_off.unread
def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """On the current stream."""
    target.copy_(source, non_blocking=True)


def _wait(device: torch.device, owner: torch.Stream, event: torch.Event) -> None:
    owner.wait_event(event)
    current = streams.current_stream(device)
    if current != owner:
        current.wait_event(event)


class _Block:
    """Pinned memory. ``last_read`` is recorded after the last fetch from it."""

    __slots__ = ("last_read", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.last_read: torch.Event | None = None

    def size(self) -> int:
        return self.memory.numel()


class _Pool:
    """Pinned blocks. Whoever asks gets the smallest free one that is large enough."""

    def __init__(self, budget_bytes: float) -> None:
        self.budget_bytes = budget_bytes
        self.pinned_bytes = 0
        self._lock = threading.Lock()
        self._free: list[_Block] = []  # by size
        self._freed: deque[_Block] = deque()  # since somebody asked last
        self._pinned: list[_Block] = []

    def allocate(self, size: int) -> _Block:
        rounded = host_bytes(size)
        with self._lock:
            self._collect_freed()
            return self._take(rounded) or self._new(rounded)

    def reserve(self, sizes: Iterable[int]) -> None:
        """Have room for all of ``sizes`` at once.

        Where a block is missing, the largest free one is given back for it: it was too small, and the new one serves
        for it as well. So the pool of several plans is as large as the largest of them needs, block by block.
        """
        taken: list[_Block] = []
        with self._lock:
            self._collect_freed()
            try:
                for rounded in sorted(map(host_bytes, sizes), reverse=True):
                    block = self._take(rounded)
                    if block is None:
                        self._give_back(self._free[-1:])
                        block = self._new(rounded)
                    taken.append(block)
            finally:
                self._freed.extend(taken)

    def free(self, block: _Block) -> None:
        """Without the lock: a finalizer calls this, at any moment."""
        self._freed.append(block)

    def _collect_freed(self) -> None:
        while self._freed:
            insort(self._free, self._freed.popleft(), key=_Block.size)

    def _take(self, size: int) -> _Block | None:
        place = bisect_left(self._free, size, key=_Block.size)
        return self._free.pop(place) if place < len(self._free) else None

    def _new(self, size: int) -> _Block:
        if self.pinned_bytes + size > self.budget_bytes:
            raise TierError(
                f"the host tier is full: host_budget={format_bytes(self.budget_bytes)}, of which "
                f"{format_bytes(self.pinned_bytes)} are pinned, and {format_bytes(size)} more are wanted.\n"
                "Raise host_budget=, or run backward before the next forward pass."
            )
        block = _Block(self._pin(size))
        self._pinned.append(block)
        self.pinned_bytes += size
        return block

    def _give_back(self, blocks: list[_Block]) -> None:
        """Unpin free blocks, after copies that still run."""
        pinning.unpin([block.memory for block in blocks])
        for block in blocks:
            self._free.remove(block)
            self._pinned.remove(block)
            self.pinned_bytes -= block.size()

    def _pin(self, size: int) -> torch.Tensor:
        try:
            with hidden_from_modes():
                memory = pinning.pinned_buffer(size)
        except pinning.PinningError as error:
            raise TierError(
                f"{format_bytes(size)} of host memory could not be pinned ({error}), "
                f"{format_bytes(self.pinned_bytes)} are.\n"
                "Lower host_budget= below that, or raise the system's limit of locked memory."
            ) from error
        return memory

    def close(self) -> None:
        """Unpin all memory, after copies that still run."""
        with self._lock:
            pinning.unpin([block.memory for block in self._pinned])
            self._pinned.clear()
            self._free.clear()
            self._freed.clear()


def host_bytes(size: int) -> int:
    """Bytes of the pool for a storage of ``size`` bytes."""
    return -(-max(size, 1) // _ROUNDING) * _ROUNDING
