"""Bytes on a device: allocated now, still available, in all; and the peak since a moment.

An accelerator's allocator keeps one peak counter, and resetting it resets the user's. Counting a peak here resets it,
so the old value is noted, and ``give_back_peak`` raises the statistic to that again. It does so by allocating, for a
moment, memory that the allocator holds unused, of large blocks and then of small ones; it asks the device for about a
128th of what is missing at most. So the user's peak comes back where the memory of that peak is still held. Where it is
not, the old value stays noted, and is given back when the counter reaches it or memory for it is held.

What a device does not report is None: callers do without it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from lowtide.device.block_size import in_blocks
from lowtide.device.host_memory import available_host_bytes
from lowtide.device.names import index_of, is_accelerator
from lowtide.device.streams import current_stream

_SMALL_PIECE_BYTES = 1 << 20  # the largest that comes from the pool of small blocks
_PIECE_BYTES = 1 << 21  # from twenty pieces' size on an allocator asks for memory of that size alone, and keeps it so
_UNSPLIT_BYTES = 1 << 20  # a large block is handed out whole where it has so much more than was asked for
_MOST_PIECES = 1024
_lock = threading.RLock()
_counting: dict[int, list["PeakCounter"]] = {}  # by device, counts that are open, the outermost first
_forgotten: dict[int, int] = {}  # by device, the peak before it was reset here
_low: dict[int, int] = {}  # by device, what the statistic was when that could not be given back
_windows: list["PeakWindow"] = []  # that are open


class PeakCounter:
    """Bytes above the start: ``peak`` during a measurement, ``left`` after it."""

    start = 0  # what was allocated, on an accelerator
    asked_start: int | None = None  # what was asked for, where an allocator tells
    asked_peak = 0  # above that
    peak = 0
    left = 0  # negative if more was freed than made
    asked_workspace: int | None = None  # ``workspace`` of what was asked for

    def add(self, change_bytes: int) -> None:
        self.left += change_bytes
        self.peak = max(self.peak, self.left)

    @property
    def workspace(self) -> int:
        """The peak beyond what was left allocated, without what an allocator does not split off a large block.

        That depends on which blocks are free at the moment, and is not the kernel's.
        """
        counted = max(0, self.peak - max(0, self.left))
        if self.asked_workspace is None or counted <= _SMALL_PIECE_BYTES:
            return counted
        return min(counted, self.asked_workspace)


def allocated_bytes(device: str | torch.device) -> int | None:
    """What PyTorch has allocated on an accelerator; None where its allocator keeps no statistics."""
    return _statistic(index_of(device), "allocated_bytes.all.current")


def counts_all(device: str | torch.device) -> bool:
    """Whether all that is allocated on ``device`` is known; not on a CPU, nor where no statistics are kept."""
    return is_accelerator(device) and allocated_bytes(device) is not None


def unsplit_bytes(device: str | torch.device) -> int:
    """What an accelerator's allocator counts as allocated beyond what was asked for; 0 where it does not tell."""
    if not is_accelerator(device):
        return 0
    asked = _statistic(index_of(device), "requested_bytes.all.current")
    return max(0, (allocated_bytes(device) or 0) - asked) if asked else 0


def segments_of(device: str | torch.device) -> list[tuple[int, bool, list[tuple[int, bool]]]] | None:
    """What an accelerator's allocator holds for its default stream: segments by address.

    Of each: the address, whether it is for small blocks, and its blocks in order, with bytes and whether it is in use.

    Returns:
        None where it does not tell, where segments grow, or on another stream.
    """
    snapshot = getattr(torch.get_device_module(device), "memory_snapshot", None)
    if snapshot is None or current_stream(torch.device(device)).stream_id != 0:
        return None
    found = []
    for segment in snapshot():
        if segment["device"] != index_of(device) or segment["stream"] != 0:
            continue
        if segment["is_expandable"]:
            return None
        if tuple(segment["segment_pool_id"]) == (0, 0):  # others are of captured graphs
            blocks = [(block["size"], block["state"] != "inactive") for block in segment["blocks"]]
            found.append((segment["address"], segment["segment_type"] == "small", blocks))
    return found


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
    call ``give_back_peak`` afterwards. One count may lie in another: a kernel is measured while its step is.

    Yields:
        The counter; None where the device's allocator keeps no statistics.
    """
    index = index_of(device)
    before = _statistic(index, "allocated_bytes.all.current")
    if before is None:
        yield None
        return
    counter = PeakCounter()
    counter.start, counter.asked_start = before, _statistic(index, "requested_bytes.all.current")
    with _lock:
        _forget_peak(index)  # those around this one note it
        around = _counting.setdefault(index, [])
        around.append(counter)
    try:
        yield counter
    finally:
        with _lock:
            _note_peak(index)
            counter.left = _now_bytes(index) - before
            if counter.asked_peak and counter.peak > _SMALL_PIECE_BYTES:
                asked = (_statistic(index, "requested_bytes.all.current") or 0) - (counter.asked_start or 0)
                workspace = max(0, counter.asked_peak - max(0, asked))
                counter.asked_workspace = in_blocks(workspace, torch.device(device).type)
            around.remove(counter)
            if not around:
                del _counting[index]


def _note_peak(index: int) -> None:
    """Before the statistic is forgotten: what it is for those who count. Called with the lock held."""
    if counters := _counting.get(index):
        peak = _peak_bytes(index)
        asked = _statistic(index, "requested_bytes.all.peak")  # None or 0: it does not tell
        for counter in counters:
            counter.peak = max(counter.peak, peak - counter.start)
            if asked and counter.asked_start is not None:
                counter.asked_peak = max(counter.asked_peak, asked - counter.asked_start)


class PeakWindow:
    """What the allocator counts as the peak of ``device`` from here to ``close``. Nothing is synchronised.

    The statistic tells of all the time since it was reset last. So a window's peak is known where the statistic rises
    inside it, or is reset inside (by ``counted_peak``, or by the user, whose peak starts there).

    Args:
        afresh: Reset it first, so that the peak is known in any case; ``close`` gives the old one back.
    """

    def __init__(self, device: str | torch.device, *, afresh: bool = False) -> None:
        self._device = device
        self.index = index_of(device)
        self._before = _statistic(self.index, "allocated_bytes.all.peak")  # None: it keeps no statistics
        self._peak: int | None = None
        if self._before is None:
            return
        with _lock:
            _look_for_reset(self.index)
            _windows.append(self)
            if afresh and self.index not in _counting:
                _forget_peak(self.index)

    def note(self) -> None:
        """Read the statistic."""
        peak = _peak_bytes(self.index)
        if peak != self._before:
            self._peak = max(self._peak or 0, peak)

    def restart(self, known_bytes: int) -> None:
        """The statistic was changed: what it says above ``known_bytes`` is of this window."""
        self._before = known_bytes

    def close(self) -> int | None:
        """The peak in bytes, all that is allocated on the device included; None where it is not known."""
        if self._before is None:
            return None
        with _lock:
            if self not in _windows:
                return self._peak
            self.note()
            _windows.remove(self)
        give_back_peak(self._device)
        return self._peak


@contextmanager
def uncounted(device: str | torch.device) -> Iterator[None]:
    """What is allocated and freed inside is in nobody's peak."""
    index = index_of(device)
    if _statistic(index, "allocated_bytes.all.peak") is None:
        yield
        return
    with _lock:
        _forget_peak(index)
        try:
            yield
        finally:
            torch.accelerator.reset_peak_memory_stats(index)


def _forget_peak(index: int) -> None:
    """Reset the statistic; whoever watches it reads it before."""
    with _lock:
        _look_for_reset(index)
        _note_peak(index)
        for window in _windows:
            if window.index == index:
                window.note()
        _forgotten[index] = max(_forgotten.get(index, 0), _peak_bytes(index))
        torch.accelerator.reset_peak_memory_stats(index)
        for window in _windows:
            if window.index == index:
                window.restart(-1)


def give_back_peak(device: str | torch.device) -> None:
    """Lift the allocator's peak to what it was before it was forgotten here, as far as unused memory reaches."""
    if not is_accelerator(device):
        return
    index = index_of(device)
    with _lock:
        _look_for_reset(index)
        if index in _counting or index not in _forgotten:
            return
        peak = _forgotten[index]
        inside = [window for window in _windows if window.index == index]
        for window in inside:
            window.note()
        _lift_peak(index, torch.device(torch.device(device).type, index), peak)
        lifted = _peak_bytes(index)
        for window in inside:
            window.restart(lifted)
        if lifted >= peak:
            del _forgotten[index]
        else:
            _low[index] = lifted


def _look_for_reset(index: int) -> None:
    """A statistic that is lower than it was when it could not be raised has been reset by the user: that holds."""
    low = _low.pop(index, None)
    if low is not None and _peak_bytes(index) < low:
        del _forgotten[index]


def peak_not_given_back(device: str | torch.device) -> int | None:
    """The peak that the statistic no longer shows, since it was reset here and could not be raised again; or None."""
    return _forgotten.get(index_of(device)) if is_accelerator(device) else None


def _lift_peak(index: int, device: torch.device, peak: int) -> None:
    """Allocate for a moment, until ``peak`` bytes are."""
    missing = peak - _now_bytes(index)
    if peak <= _peak_bytes(index) or missing <= 0:
        return
    pieces: list[torch.Tensor] = []
    size = max(_PIECE_BYTES, missing >> 8)
    with suppress(torch.OutOfMemoryError):  # the statistic stays too low
        while missing > 0:
            if size >= _PIECE_BYTES and missing < size + _UNSPLIT_BYTES:  # it might be lifted too high
                size = size >> 1
                continue
            piece = size if size >= _PIECE_BYTES else min(_SMALL_PIECE_BYTES, missing)
            reserved = _held_bytes(index)
            pieces.append(_empty(piece, device))
            missing = peak - _now_bytes(index)
            is_used_up = _held_bytes(index) > reserved or len(pieces) >= _MOST_PIECES
            if is_used_up and size < _PIECE_BYTES:
                return
            size = size >> 1 if is_used_up else size


def _empty(size: int, device: torch.device) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():  # no op of whoever watches this thread
        return torch.empty(size, dtype=torch.uint8, device=device)


def _peak_bytes(index: int) -> int:
    """``torch.accelerator.max_memory_allocated``."""
    return _statistic(index, "allocated_bytes.all.peak") or 0


def _now_bytes(index: int) -> int:
    """``torch.accelerator.memory_allocated``."""
    return _statistic(index, "allocated_bytes.all.current") or 0


def _held_bytes(index: int) -> int:
    """``torch.accelerator.memory_reserved``."""
    return _statistic(index, "reserved_bytes.all.current") or 0


def _statistic(index: int, name: str) -> int | None:
    """As ``torch.accelerator.memory_stats`` has it, which sorts all of them first: 0.15 ms for one."""
    try:
        if not torch._C._accelerator_isAllocatorInitialized():
            return 0
        found: Any = torch._C._accelerator_getDeviceStats(index)
    except (RuntimeError, NotImplementedError):  # an allocator of a kind that keeps none
        return None
    for part in name.split("."):
        found = found.get(part, {})
    return found or 0
