"""What Python asks of the loaded stand-in."""

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cuda_standin import loading, settings


@dataclass(frozen=True)
class Counters:
    """Since the process began.

    Attributes:
        launches: Kernels launched, graphs included.
        waits: How often the host waited for the device: ``.item()``, ``synchronize()``, blocking copies.
        used_bytes: What each device has handed out now, in pages of 2 MiB.
        peak_bytes: The most that each device had handed out.
        pinned_peak_bytes: The most pinned memory of the host.
    """

    launches: int
    waits: int
    used_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    pinned_peak_bytes: int


@dataclass(frozen=True)
class Report:
    """Which operators ran.

    Attributes:
        calls: By operator with its overload, how often its CUDA kernel was asked for.
        without_values: By operator, how often it was left without values, and the last reason.
    """

    calls: dict[str, int]
    without_values: dict[str, tuple[int, str]]


def is_loaded() -> bool:
    """Whether this process' PyTorch runs on the stand-in."""
    return loading.folder is not None


def counters() -> Counters:
    runtime = loading.runtime()
    for name in ("standin_launches", "standin_waits"):
        getattr(runtime, name).restype = ctypes.c_ulonglong
    for name in ("standin_used", "standin_peak", "standin_pinned_peak"):
        getattr(runtime, name).restype = ctypes.c_size_t
    devices = range(runtime.standin_devices())
    return Counters(
        launches=runtime.standin_launches(),
        waits=runtime.standin_waits(),
        used_bytes=tuple(runtime.standin_used(device) for device in devices),
        peak_bytes=tuple(runtime.standin_peak(device) for device in devices),
        pinned_peak_bytes=runtime.standin_pinned_peak(),
    )


def report() -> Report:
    values = loading.values()
    values.standin_report.restype = ctypes.c_char_p
    calls, missing = {}, {}
    for line in values.standin_report().decode(errors="replace").splitlines():
        kind, name, number, *why = line.split(" ", 3)
        if kind == "calls":
            calls[name] = int(number)
        elif kind == "missing":
            missing[name] = (int(number), why[0])
    return Report(calls, missing)


def unsupported_calls() -> list[str]:
    """Functions of CUDA's libraries that somebody called and that the stand-in does not have."""
    runtime = loading.runtime()
    runtime.standin_unsupported_calls.restype = ctypes.c_char_p
    return runtime.standin_unsupported_calls().decode().splitlines()


def foreign_libraries() -> list[str]:
    """Libraries that are not PyTorch's and that launched kernels of their own, which gave no values."""
    runtime = loading.runtime()
    runtime.standin_foreign_libraries.restype = ctypes.c_char_p
    return runtime.standin_foreign_libraries().decode().splitlines()


def set_capacity(mib: float, device: int = 0) -> None:
    """Gives ``device`` another capacity, in MiB; what it handed out stays."""
    loading.runtime().standin_set_capacity(ctypes.c_int(device), ctypes.c_size_t(int(mib * 2**20)))


@contextlib.contextmanager
def run_late(which: str = "all") -> Iterator[None]:
    """Inside, work runs as late as events allow, so that a wait that is missing gives wrong numbers.

    Args:
        which: ``"copies"`` on side streams, ``"side"`` streams, the ``"default"`` stream, or ``"all"``. What is not
            named runs when it is submitted: a stream that waits for nothing is wrong in ``"default"`` or in ``"side"``.
    """
    runtime = loading.runtime()
    runtime.standin_set_late(settings.LATE[which])
    try:
        yield
    finally:
        runtime.standin_set_late(0)


def host_clock_ns() -> int:
    """A clock that stands still while the stand-in computes values or copies: what is left is the host's own time."""
    runtime = loading.runtime()
    runtime.standin_host_clock.restype = ctypes.c_longlong
    return int(runtime.standin_host_clock())


def record_graphs() -> None:
    """From now on what CUDA graphs are made of is kept, so that a recorded step can say what it replays."""
    loading.runtime().standin_record_captures()


def begin_step_record() -> None:
    """From now on what the host asks of the device is recorded, until ``end_step_record``."""
    loading.runtime().standin_record_begin()


def end_step_record(path: str | Path) -> int:
    """Writes the record as JSON, and returns how many entries it has (``csrc/runtime/step_record.h``).

    Raises:
        OSError: ``path`` cannot be written.
    """
    runtime = loading.runtime()
    runtime.standin_record_end.restype = ctypes.c_longlong
    count = int(runtime.standin_record_end(str(path).encode()))
    if count < 0:
        raise OSError(f"{path} cannot be written")
    return count


@contextlib.contextmanager
def log_operators(path: str | Path) -> Iterator[None]:
    """Inside, each operator and each allocation in it is a line of ``path``: workspaces become visible."""
    values = loading.values()
    values.standin_log_operators(str(path).encode())
    try:
        yield
    finally:
        values.standin_log_operators(None)
