"""Milliseconds of calls on a device: two events where it has them, else the wall clock.

``calls_ms`` waits for the device. ``Spans`` never does: its events are read when they are over.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from lowtide.device.names import is_accelerator
from lowtide.device.streams import current_stream, synchronize


def calls_ms(fn: Callable[[], Any], calls: int, device: str | torch.device, now: Callable[[], float]) -> float:
    """Return the milliseconds of a call, the mean of ``calls`` in a row; ``now`` is the clock on a CPU."""
    device = torch.device(device)
    if is_accelerator(device):
        if _has_timed_events(device.type):
            return _by_events(fn, calls, device)
        now = time.perf_counter
    synchronize(device)
    start = now()
    for _ in range(calls):
        fn()
    synchronize(device)
    return (now() - start) * 1e3 / calls


def _by_events(fn: Callable[[], Any], calls: int, device: torch.device) -> float:
    begin, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    synchronize(device)
    begin.record(current_stream(device))
    for _ in range(calls):
        fn()
    end.record(current_stream(device))
    synchronize(device)
    return begin.elapsed_time(end) / calls


@cache
def _has_timed_events(device_type: str) -> bool:
    try:
        _by_events(lambda: None, 1, torch.device(device_type))
    except (RuntimeError, NotImplementedError):
        return False
    return True


_IDLE_MS = 0.005  # between two events with no call in between


class OpenSpan(NamedTuple):
    """A call that runs: when the host began it, and the event before it."""

    start_s: float
    begin: torch.Event | None


@dataclass(slots=True)  # one is made for each op: frozen ones take three times as long
class Span:
    """One call.

    Attributes:
        launch_s: Seconds of the host: on a CPU what the call took, on a device what launching it took.
    """

    launch_s: float
    begin: torch.Event | None
    end: torch.Event | None
    before: torch.Event | None = None  # the end of the call before it

    def ms(self) -> float:
        """Milliseconds between its events, which must be over; without events, of the host."""
        if self.begin is None or self.end is None:
            return 1e3 * self.launch_s
        return float(self.begin.elapsed_time(self.end))

    def waited_ms(self) -> float:
        """Of ``ms``, what the device waited for the launch where it had nothing left to run before. At most."""
        if self.before is None or self.begin is None or self.before.elapsed_time(self.begin) < _IDLE_MS:
            return 0.0
        return min(1e3 * self.launch_s, self.ms())


class Spans:
    """Times calls on a device, of which nobody waits for the end.

    A span begins when the device comes to the call. Where the device waits for the host, it has the launch of the
    call's kernels in it (``Span.waited_ms``).

    Attributes:
        timed: By events; else by the host's clock.
    """

    def __init__(self, device: str | torch.device) -> None:
        self._device = torch.device(device)
        self.timed = is_accelerator(self._device) and _takes_timed_events(self._device)
        self._not_over: list[torch.Event] = []
        self._last: torch.Event | None = None  # the end of the last call

    def begin(self) -> OpenSpan:
        event = self._recorded() if self.timed else None
        return OpenSpan(time.perf_counter(), event)

    def end(self, opened: OpenSpan) -> Span:
        launch_s = time.perf_counter() - opened.start_s
        if opened.begin is None:
            return Span(launch_s, None, None)
        event = self._recorded()
        self._not_over.append(event)
        before, self._last = self._last, event
        return Span(launch_s, opened.begin, event, before)

    def are_over(self) -> bool:
        """Whether the device has passed all of them. Asks, and does not wait."""
        while self._not_over and self._not_over[-1].query():
            self._not_over.pop()
        return not self._not_over

    def _recorded(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(current_stream(self._device))
        return event


def _takes_timed_events(device: torch.device) -> bool:
    try:
        event = torch.Event(device, enable_timing=True)
        event.record(current_stream(device))
        event.query()
    except (RuntimeError, NotImplementedError):
        return False
    return True
