"""Milliseconds of calls on a device: two events where it has them, else the wall clock around a synchronised device."""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

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
