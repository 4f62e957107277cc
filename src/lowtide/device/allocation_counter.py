"""What PyTorch's allocators hand out, counted from their own events: by some lines of C++, where a compiler is.

It costs 0.3 us an op. It lies in the profiler's slot of the thread, so it goes when a profiler starts, and never comes
while one is active. Where it cannot be built, nobody counts: ``why_missing`` says why.

Known weaknesses, on a CPU: memory that native libraries take past PyTorch's allocator is not seen. What was allocated
while nobody counted has no known size when it is freed, or the size of the block that was counted at its address.
"""

import ctypes
import sys
import weakref
from typing import Any

import torch
from torch.autograd import profiler

from lowtide.device.names import index_of, is_accelerator
from lowtide.device.native_library import HANDLE, INTEGER, NativeLibrary

_MOST_DEVICES = 64
_HOST = -1

_places: dict[int, "_Place"] = {}  # by what lies in the slot: a backward may have it on threads of its own


def prepare(*, waits: bool = False) -> None:
    """Load the counter; see ``NativeLibrary.prepare``."""
    NATIVE.prepare(waits=waits)


def why_missing() -> str:
    """Why nobody counts; "" where the counter is there, or may still come."""
    return NATIVE.why_missing


def is_there() -> bool:
    return NATIVE.loaded is not None


class AllocationWindow:
    """Counts on this thread from here on. Windows may overlap in any way.

    Args:
        device: Whose memory.
    """

    def __init__(self, device: str | torch.device, place: "_Place") -> None:
        self._place = place
        self._device = index_of(device) if is_accelerator(device) else _HOST
        self.is_of_host = self._device == _HOST
        place.note_peaks()
        self._start = place.now(self._device) if self.is_of_host else 0
        self._peak = 0
        self._left: int | None = None
        self.lost = False  # a profiler has taken the counter's place
        place.windows.add(self)

    def note(self, peaks: dict[int, int]) -> None:
        self._peak = max(self._peak, peaks.get(self._device, 0) - self._start)

    @property
    def device(self) -> int:
        return self._device

    def close(self) -> None:
        if self._left is None:
            self._left = 0
            self._place.leave(self)

    def end(self, left: int) -> None:
        """The last that is known: ``left`` bytes now."""
        self._left = left - self._start

    def reader(self, start_bytes: int = 0) -> "LiveBytes":
        """Tells what lives now less ``start_bytes``, as ``peak_bytes`` counts; None: nobody counts any more.

        On an accelerator 0 as long as nothing was allocated.
        """
        return LiveBytes(self, self._place.handle, self._device, start_bytes + self._start)

    @property
    def is_closed(self) -> bool:
        return self._left is not None

    @property
    def peak_bytes(self) -> int:
        """On a CPU above what was there at the start; on an accelerator all that was allocated, 0: nothing was."""
        return self._peak

    @property
    def left_bytes(self) -> int:
        """At the end, likewise."""
        return self._left or 0

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # None: a module's names are gone before what it made
            self.close()


class LiveBytes:
    """What lives while a window is open; see ``AllocationWindow.reader``.

    Attributes:
        place: Where the count stands, in bytes: C++ reads it there. It is readable for ever.
        less_bytes: So much of the count was there before.
    """

    __slots__ = ("_device", "_handle", "_now", "_window", "less_bytes", "place")

    def __init__(self, window: AllocationWindow, handle: int, device: int, less_bytes: int) -> None:
        self._window, self._handle, self._device = weakref.ref(window), handle, device
        self._now = NATIVE.loaded.lowtide_counter_now
        self.place: int = NATIVE.loaded.lowtide_counter_place(handle, device)
        self.less_bytes = less_bytes

    def __call__(self) -> int | None:
        window = self._window()
        if window is None or window.is_closed:
            return None
        found: int = self._now(self._handle, self._device)
        return found - self.less_bytes if found or self._device == _HOST else 0


class _Place:
    """A counter, while any window of it is open."""

    def __init__(self, handle: int) -> None:
        self.handle, self._key = handle, NATIVE.loaded.lowtide_counter_here()
        self.windows: weakref.WeakSet[AllocationWindow] = weakref.WeakSet()
        _places[self._key] = self

    @property
    def _counts(self) -> bool:
        return _places.get(self._key) is self

    def now(self, device: int) -> int:
        return int(NATIVE.loaded.lowtide_counter_now(self.handle, device))

    def note_peaks(self) -> None:
        devices = {window.device for window in self.windows}
        peaks = {device: int(NATIVE.loaded.lowtide_counter_take_peak(self.handle, device)) for device in devices}
        for window in self.windows:
            window.note(peaks)

    def leave(self, window: AllocationWindow) -> None:
        with NATIVE.lock:
            if not self._counts:
                return
            self.windows.add(window)  # it is being forgotten, perhaps
            self.note_peaks()
            window.end(self.now(window.device))
            self.windows.discard(window)
            if not self.windows:
                self._stop()

    def step_aside(self) -> None:
        """A profiler starts on this thread."""
        self.note_peaks()
        for window in list(self.windows):
            window.lost = True
            window.end(self.now(window.device))
        self._stop()

    def _stop(self) -> None:
        del _places[self._key]
        NATIVE.loaded.lowtide_counter_stop(self.handle)
        NATIVE.loaded.lowtide_counter_free(self.handle)


def count(device: str | torch.device = "cpu") -> AllocationWindow | None:
    """Count what is allocated on ``device``; None where the counter is missing, or a profiler is active."""
    if NATIVE.loaded is None or (is_accelerator(device) and index_of(device) >= _MOST_DEVICES):
        return None
    with NATIVE.lock:
        place = _places.get(NATIVE.loaded.lowtide_counter_here())
        if place is None:
            handle = NATIVE.loaded.lowtide_counter_start()
            if not handle:
                return None
            place = _Place(handle)
        return AllocationWindow(device, place)


def step_aside() -> None:
    """Leave the profiler's slot of this thread: what counts there loses count."""
    with NATIVE.lock:
        if (place := _places.get(NATIVE.loaded.lowtide_counter_here())) is not None:
            place.step_aside()


# -- the library --------------------------------------------------------------------------------------------


def _step_aside_for_profilers(_: Any) -> None:
    before = profiler._run_on_profiler_start

    def run_on_profiler_start() -> None:
        step_aside()
        before()

    profiler._run_on_profiler_start = run_on_profiler_start  # each of PyTorch's profilers calls it first


NATIVE = NativeLibrary(
    "allocation_counter",
    "the counter",
    "LOWTIDE_ALLOCATION_COUNTER",
    {
        "lowtide_counter_start": (HANDLE, []),
        "lowtide_counter_here": (HANDLE, []),
        "lowtide_counter_stop": (None, [HANDLE]),
        "lowtide_counter_free": (None, [HANDLE]),
        "lowtide_counter_now": (INTEGER, [HANDLE, ctypes.c_int]),
        "lowtide_counter_place": (HANDLE, [HANDLE, ctypes.c_int]),
        "lowtide_counter_take_peak": (INTEGER, [HANDLE, ctypes.c_int]),
    },
    _step_aside_for_profilers,
)
