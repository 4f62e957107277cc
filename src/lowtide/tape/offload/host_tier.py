"""The host tier: storages of a model on CUDA in pinned host memory, copied on streams of their own.

Not run on a GPU by this project's tests; they check the order of events against a stand-in for ``torch.cuda``.

- Copies out and copies back each have a stream. Nothing synchronises: an event is recorded behind each copy, and
  whichever stream needs the copy done waits for that event.
- The caching allocator gives freed memory to the next allocation on the stream that it came from. A moved storage is
  let go only after the compute stream has been told to wait for its copy, and memory to fetch into is allocated on the
  compute stream, which the other streams wait for first; so no ``record_stream`` is needed, and when memory is free
  does not depend on how fast copies are.
- Pinned memory comes from a pool by size, rounded up to 64 KiB, and is registered by us: the allocator's own rounds up
  to powers of two. Blocks lie on pages of their own, since a page is registered once. The pool grows up to the budget
  and is kept until the tier goes; what a plan moves is pinned when the tier is opened, so that what cannot be is known
  before the first step.
- A registration that fails leaves an error behind that the next kernel, whosever it is, would be blamed for: it is
  taken away.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import cuda

from lowtide.errors import TierError
from lowtide.tape.offload.tiers import bytes_of, hidden_from_modes
from lowtide.units import format_bytes

_CLASS, _PAGE = 1 << 16, 1 << 12


class HostTier:
    """Pinned memory and, for each device, the streams to and from it.

    Args:
        budget_bytes: Most bytes to pin; None: as many as the system gives.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.pool = _Pool(budget_bytes)
        self._streams: dict[torch.device, tuple[cuda.Stream, cuda.Stream]] = {}
        weakref.finalize(self, self.pool.close)

    def streams(self, device: torch.device) -> tuple[cuda.Stream, cuda.Stream]:
        """Out and back; ``device`` as a storage names it, which need not be the current one."""
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device), cuda.Stream(device)
        return self._streams[device]

    def reserve(self, sizes: Iterable[int]) -> None:
        """Pin memory for storages of ``sizes`` at once. Raises: TierError: see ``store``."""
        blocks = [self.pool.take(size) for size in sizes]
        for block in blocks:
            self.pool.give_back(block)

    def store(self, storage: torch.UntypedStorage) -> HostTicket:
        """Start to copy ``storage``. Raises: TierError: the budget is used up, or memory cannot be pinned."""
        return HostTicket(self, storage)


class HostTicket:
    """One storage in pinned memory. See ``Ticket``."""

    def __init__(self, tier: HostTier, storage: torch.UntypedStorage) -> None:
        self._device, self._size = storage.device, storage.nbytes()
        self._tier = tier  # the streams and the pool live as long as what they carry
        self._block = tier.pool.take(self._size)
        weakref.finalize(self, tier.pool.give_back, self._block)
        self._original: torch.Tensor | None = bytes_of(storage)
        self._buffer: torch.Tensor | None = None
        out, _ = tier.streams(self._device)
        with _named():
            out.wait_stream(cuda.current_stream(self._device))  # for the op that makes it
            if self._block.read is not None:
                out.wait_event(self._block.read)  # what was there before is still being fetched
            with hidden_from_modes(), cuda.stream(out):
                _copy(self._block.memory[: self._size], self._original)
                written = cuda.Event()
                written.record(out)
        # Also where it is never settled: its memory goes to the next on the compute stream.
        self._leaves = weakref.finalize(self, _wait, self._device, written)
        self._leaves.atexit = False

    def settle(self) -> None:
        if self._original is not None:
            self._leaves()
            self._original = None

    def start_fetch(self) -> None:
        if self._buffer is not None:
            return
        self.settle()
        _, back = self._tier.streams(self._device)
        with hidden_from_modes():
            self._buffer = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        with _named():
            # For whoever had this memory before, and for the copy out.
            back.wait_stream(cuda.current_stream(self._device))
            with hidden_from_modes(), cuda.stream(back):
                _copy(self._buffer, self._block.memory[: self._size])
                read = cuda.Event()
                read.record(back)
        self._block.read = read
        # Nobody may want it in the end: then its memory goes to the next on the compute stream.
        self._unused = weakref.finalize(self, _wait, self._device, read)
        self._unused.atexit = False

    def fetch(self) -> torch.Tensor:
        self.start_fetch()
        assert self._buffer is not None
        self._unused()
        buffer, self._buffer = self._buffer, None
        return buffer


@contextmanager
def _named() -> Iterator[None]:
    """What CUDA refuses inside is an error of this tier, so that a plan without it can be made; memory that runs out on
    the device is not."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise TierError(
            f"the host tier failed: {str(error).splitlines()[0]}\nLeave host_budget= out, or pass None."
        ) from error


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """On the stream that is current."""
    target.copy_(source, non_blocking=True)


def _wait(device: torch.device, event: cuda.Event) -> None:
    cuda.current_stream(device).wait_event(event)


class _Block:
    """Pinned memory; ``read``: recorded behind the last copy out of it."""

    __slots__ = ("memory", "read")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.read: cuda.Event | None = None


class _Pool:
    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.pinned_bytes = 0
        self._lock = threading.Lock()
        self._free: dict[int, list[_Block]] = {}
        self._registered: list[torch.Tensor] = []

    def take(self, size: int) -> _Block:
        rounded = host_bytes(size)
        with self._lock:
            free = self._free.get(rounded)
            if free:
                return free.pop()
            if self.budget_bytes is not None and self.pinned_bytes + rounded > self.budget_bytes:
                raise TierError(
                    f"the host tier is full: host_budget={format_bytes(self.budget_bytes)}, of which "
                    f"{format_bytes(self.pinned_bytes)} are pinned, and {format_bytes(rounded)} more are wanted.\n"
                    "Raise host_budget=, or run backward before the next forward pass."
                )
            block = _Block(self._pin(rounded))
            self.pinned_bytes += rounded
            return block

    def allow(self, count: int) -> None:
        """Let the pool hold ``count`` bytes, if it may not yet."""
        with self._lock:
            if self.budget_bytes is not None:
                self.budget_bytes = max(self.budget_bytes, count)

    def give_back(self, block: _Block) -> None:
        with self._lock:
            self._free.setdefault(block.memory.numel(), []).append(block)

    def _pin(self, size: int) -> torch.Tensor:
        with hidden_from_modes():
            memory = torch.empty(size + _PAGE, dtype=torch.uint8)
            begin = -memory.data_ptr() % _PAGE
            memory = memory[begin : begin + size]
        code = int(cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 1))  # 1: portable
        if code:
            _forget_error()
            raise TierError(
                f"{format_bytes(size)} of host memory could not be pinned (CUDA error {code}), "
                f"{format_bytes(self.pinned_bytes)} are.\n"
                "Lower host_budget= below that, or raise the system's limit of locked memory."
            )
        self._registered.append(memory)
        return memory

    def close(self) -> None:
        """Give all of it back to the system; copies that still run are waited for."""
        with self._lock:
            if self._registered:
                cuda.synchronize()
            for memory in self._registered:
                cuda.cudart().cudaHostUnregister(memory.data_ptr())
            self._registered.clear()
            self._free.clear()


def _forget_error() -> None:
    """Take away the error that a failed call has left behind."""
    clear = getattr(cuda.cudart(), "cudaGetLastError", None)  # not in every torch that this runs with
    if clear is not None:
        clear()
        return
    try:
        with hidden_from_modes():
            torch.ones(1, device="cuda")  # the launch is blamed, and the error is gone
    except (RuntimeError, AssertionError):  # the second: this torch knows no CUDA
        pass


def host_bytes(size: int) -> int:
    """What ``size`` bytes take in the pool."""
    return -(-max(size, 1) // _CLASS) * _CLASS
