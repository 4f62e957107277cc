"""The script's own clocks, on a GPU that is not there: each step takes what it was found to take.

``time.time``, ``time.perf_counter`` and CUDA's events read it, so that what the script prints of its own speed is that
of the device. The first step takes what it takes here as well: compiling, filling caches. Within a step the clock runs
with the host, and stands still where the host has done its part.
"""

import time
from typing import Any

from cuda_standin import control
from cuda_standin.script.request import Request

_PATCHED = ("time", "time_ns", "perf_counter", "perf_counter_ns")  # the standard library waits by ``monotonic``
_real = {name: getattr(time, name) for name in _PATCHED}


class _Clock:
    def __init__(self, step_ms: float, host_ms: float) -> None:
        self._step_ns, self._host_ns = round(step_ms * 1e6), max(1, round(host_ms * 1e6))
        self._now = self._began = _real["perf_counter_ns"]()  # of the present step: by this clock, by the host's
        self._is_first = True

    def now_ns(self) -> int:
        """Never goes back."""
        if self._is_first:
            return self._now + _real["perf_counter_ns"]() - self._began
        done = (control.host_clock_ns() - self._began) / self._host_ns
        return self._now + round(min(1.0, done) * self._step_ns)

    def step_ended(self) -> None:
        if self._is_first:
            self._now += max(self._step_ns, _real["perf_counter_ns"]() - self._began)
        else:
            self._now += self._step_ns
        self._began, self._is_first = control.host_clock_ns(), False


_clock: _Clock | None = None


def install(wanted: Request) -> None:
    """Before the script's own code runs, where a clock is wanted."""
    global _clock
    if not wanted.clock_step_ms:
        return
    clock = _clock = _Clock(wanted.clock_step_ms, wanted.clock_host_ms)
    ahead = _real["time_ns"]() - clock.now_ns()
    time.perf_counter_ns = clock.now_ns
    time.perf_counter = lambda: clock.now_ns() / 1e9
    time.time_ns = lambda: clock.now_ns() + ahead
    time.time = lambda: (clock.now_ns() + ahead) / 1e9


def step_ended() -> None:
    if _clock is not None:
        _clock.step_ended()


def event_times(torch: Any) -> None:
    """What passes between two events, by this clock: when the host recorded them."""
    if _clock is None:
        return
    record, clock = torch.cuda.Event.record, _clock

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        self._recorded_ns = clock.now_ns()
        record(self, *args, **kwargs)

    torch.cuda.Event.record = noted
    torch.cuda.Event.elapsed_time = lambda self, end: (end._recorded_ns - self._recorded_ns) / 1e6
