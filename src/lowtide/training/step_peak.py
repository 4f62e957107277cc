"""The peak of one step after another, as the allocator counts it."""

from collections.abc import Callable

import torch

from lowtide.device import allocation_counter
from lowtide.device.allocation_counter import AllocationWindow
from lowtide.device.memory import PeakWindow, allocated_bytes, give_back_peak, peak_not_given_back
from lowtide.device.names import is_accelerator
from lowtide.training.notices import Notices
from lowtide.units import format_bytes

_PROFILED = (
    "steps are not counted while a profiler is active: PyTorch's allocators report to one of them. status() has the "
    "peaks of the others"
)


class StepPeak:
    """Counts from ``begin`` to ``end``; what keeps it from counting is told."""

    def __init__(self, reasons: Notices) -> None:
        self._reasons = reasons
        self._device = torch.device("cpu")
        self._start_bytes = 0
        self._window: PeakWindow | None = None  # of the present step, on a device
        self._allocated: AllocationWindow | None = None  # of the present step
        self._made_bytes: Callable[[], int | None] | None = None
        self._reports_all = False  # the device's allocator does to the counter, as a step has shown
        self._lost = ""  # that the user's peak statistic could not be given back, as it was told

    def begin(self, device: torch.device, start_bytes: int, *, afresh: bool) -> None:
        """A step begins on ``device``, where ``start_bytes`` are there before.

        Args:
            afresh: Its peak is to be known in any case.
        """
        self._device, self._start_bytes = device, start_bytes
        self._allocated = counter = allocation_counter.count(device)
        self._made_bytes = None if counter is None else counter.reader(start_bytes if is_accelerator(device) else 0)
        if is_accelerator(device) and not (self._allocated and self._reports_all):
            self._window = PeakWindow(device, afresh=afresh)
        elif self._allocated is None and (why := self._why_not_counted()) is not None:
            self._reasons.say_first("not counted", why)

    @property
    def made_bytes(self) -> Callable[[], int | None] | None:
        """Tells what the present step has made and still holds; None: nobody counts."""
        return self._made_bytes

    def _why_not_counted(self) -> str | None:
        """Why a step on a CPU goes by uncounted, to be told; None: the counter is still to come."""
        if why := allocation_counter.why_missing():
            return f"steps under a plan are not counted: {why}. status() has the peaks of steps without one"
        return _PROFILED if allocation_counter.is_there() else None

    def stop(self) -> None:
        """The step's ops have run: what its record needs from here on is not of the step."""
        allocated = self._allocated
        if allocated is None:
            return
        allocated.close()
        if not (allocated.lost or allocated.is_of_host or self._reports_all):
            # An allocator that reports nothing, or something else, is no PyTorch's.
            self._reports_all = allocated.left_bytes == allocated_bytes(self._device)
            if not self._reports_all:
                self._allocated = None

    def end(self, beside_bytes: int = 0) -> int | None:
        """What the allocator counted since the step began, what was there before included; None: nobody counted.

        Args:
            beside_bytes: What was there besides, on a CPU.
        """
        self.stop()
        allocated, self._allocated, self._made_bytes = self._allocated, None, None
        of_statistic = self._close_window()
        if allocated is None:
            return of_statistic
        if allocated.lost:
            self._reasons.say_first("not counted", _PROFILED)
            return of_statistic
        start_bytes = self._start_bytes + beside_bytes if allocated.is_of_host else 0
        return start_bytes + allocated.peak_bytes

    def _close_window(self) -> int | None:
        window, self._window = self._window, None
        peak = None if window is None else window.close()
        if window is None:
            give_back_peak(self._device)
        missing = peak_not_given_back(self._device)
        lost = ""
        if missing is not None:
            lost = (
                "the device's peak statistic (max_memory_allocated) is lower than what it has counted, "
                f"{format_bytes(missing)}: lowtide reset it to measure ops, and the allocator has given that memory "
                "back. status() has the peaks of the steps"
            )
        if lost != self._lost:
            self._reasons.withdraw(self._lost)
            if lost:
                self._reasons.say(lost)
        self._lost = lost
        return peak
