"""Bytes on a device: allocated now, still available, in all; and the peak since a moment.

An accelerator's allocator keeps one peak counter, and resetting it resets the user's. Counting a peak here resets it,
so the old value is noted, and ``give_back_peak`` raises the statistic to that again. It does so by allocating, for a
moment, memory that the allocator holds unused, of small blocks and of large ones; it asks the device for no more than a
256th of what is missing. So the user's peak comes back where the memory of that peak is still held, at most a MiB too
high.

What a device does not report is None: callers do without it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from lowtide.device.host_memory import available_host_bytes
from lowtide.device.names import index_of, is_accelerator

_SMALL_PIECE_BYTES = 1 << 20  # the largest that comes from the pool of small blocks
_MOST_SMALL_PIECES = 1024
_PIECE_BYTES = 1 << 21  # from twenty pieces' size on an allocator asks for memory of that size alone, and keeps it so
_lock = threading.Lock()
_counting: set[int] = set()  # devices on which a peak is being counted
_forgotten: dict[int, int] = {}  # by device, the peak before it was reset here


class PeakCounter:
    """Bytes above the start: ``peak`` during a measurement, ``left`` after it."""

    peak = 0
    left = 0  # negative if more was freed than made

    def add(self, change_bytes: int) -> None:
        self.left += change_bytes
        self.peak = max(self.peak, self.left)

    @property
    def workspace(self) -> int:
        """The peak beyond what was left allocated."""
        return max(0, self.peak - max(0, self.left))


def allocated_bytes(device: str | torch.device) -> int | None:
    """What PyTorch has allocated on an accelerator; None where its allocator keeps no statistics."""
    return _statistic(index_of(device), "allocated_bytes.all.current")


def reserved_bytes(device: str | torch.device) -> int | None:
    """What an accelerator's allocator has taken from it; None where it keeps no statistics, and on a CPU."""
    return _statistic(index_of(device), "reserved_bytes.all.current") if is_accelerator(device) else None


def available_bytes(device: str | torch.device = "cpu") -> int | None:
    """Return the bytes that PyTorch can still allocate on ``device`` now; None where it does not tell.

    On an accelerator: free on the device, plus what the caching allocator holds unused. On a CPU: see
    ``available_host_bytes``.
    """
    if not is_accelerator(device):
        return available_host_bytes()
    index = index_of(device)
    try:
        free, _ = torch.accelerator.get_memory_info(index)
    except (RuntimeError, NotImplementedError):
        return None
    held = _statistic(index, "reserved_bytes.all.current") or 0
    return free + held - (_statistic(index, "allocated_bytes.all.current") or 0)


def bytes_in_pieces(device: str | torch.device) -> int:
    """What an accelerator's allocator holds unused between blocks that are in use: little of it may fit a tensor."""
    if not is_accelerator(device):
        return 0
    return _statistic(index_of(device), "inactive_split_bytes.all.current") or 0


def is_short_of(needed_bytes: float, device: str | torch.device) -> bool:
    """Whether ``device`` says that it has less than ``needed_bytes`` available."""
    available = available_bytes(device)
    return available is not None and needed_bytes > available


def release_cached_memory() -> None:
    """Give back to the accelerator, if there is one, what its allocator holds unused."""
    if torch.accelerator.current_accelerator(check_available=True) is not None:
        with suppress(RuntimeError, NotImplementedError):  # an allocator of a kind that holds none
            torch.accelerator.empty_cache()


@contextmanager
def counted_peak(device: str | torch.device) -> Iterator[PeakCounter | None]:
    """Count what is allocated on an accelerator inside; the counter is set when the block ends.

    The allocator counts on the host, in program order, so nothing is synchronised. It forgets the peak that it had:
    call ``give_back_peak`` afterwards.

    Yields:
        The counter; None while another count runs on the device, and where its allocator keeps no statistics.
    """
    index = index_of(device)
    with _lock:
        before = None if index in _counting else _statistic(index, "allocated_bytes.all.current")
        if before is not None:
            _counting.add(index)
    if before is None:
        yield None
        return
    counter = PeakCounter()
    try:
        _forgotten[index] = max(_forgotten.get(index, 0), torch.accelerator.max_memory_allocated(index))
        torch.accelerator.reset_peak_memory_stats(index)
        yield counter
        counter.peak = torch.accelerator.max_memory_allocated(index) - before
        counter.left = torch.accelerator.memory_allocated(index) - before
    finally:
        _counting.discard(index)


def give_back_peak(device: str | torch.device) -> None:
    """Lift the allocator's peak to what it was before it was forgotten here, as far as unused memory reaches."""
    if not is_accelerator(device):
        return
    index = index_of(device)
    with _lock:
        if index in _counting or index not in _forgotten:
            return
        peak = _forgotten.pop(index)
    missing = peak - torch.accelerator.memory_allocated(index)
    if peak <= torch.accelerator.max_memory_allocated(index) or missing <= 0:
        return
    pieces: list[torch.Tensor] = []
    where = torch.device(torch.device(device).type, index)
    try:
        for size, most in ((_SMALL_PIECE_BYTES, _MOST_SMALL_PIECES), (max(_PIECE_BYTES, missing >> 8), missing)):
            reserved = torch.accelerator.memory_reserved(index)
            stop = len(pieces) + most
            while missing > 0 and len(pieces) < stop and torch.accelerator.memory_reserved(index) == reserved:
                pieces.append(_empty(min(size, missing), where))
                missing = peak - torch.accelerator.memory_allocated(index)
    except torch.OutOfMemoryError:
        return  # the statistic stays too low


def _empty(size: int, device: torch.device) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():  # no op of whoever watches this thread
        return torch.empty(size, dtype=torch.uint8, device=device)


def _statistic(index: int, name: str) -> int | None:
    try:
        return torch.accelerator.memory_stats(index).get(name, 0)
    except (RuntimeError, NotImplementedError):  # an allocator of a kind that keeps none
        return None
