"""How memory and time are measured, everywhere in lowtide.

Memory on CPU is counted from the allocator's own events (autograd's profiler), so what an op allocates inside itself
counts too; memory that native libraries take past PyTorch's allocator does not. Two limits: memory allocated before a
measurement and freed inside it is not seen (the allocator knows no size for it), so a peak can err high;
and only this thread counts, with the threads that autograd starts for it. The light, older recorder is used,
not ``torch.profiler``: both see the same events (``tests/test_allocator.py`` compares them), but it costs about 0.1 ms
a call where Kineto costs 1 ms, and prints nothing. Memory on CUDA is the caching allocator's own peak.

Time on CPU is processor time of the whole process: on a busy machine wall time measures the neighbours. The caller
sets the number of threads; with several of them processor time counts work, not how long the user waits.
"""

from __future__ import annotations

import gc
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch._C import _autograd
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from lowtide.errors import LowtideError
from lowtide.gc_control import gc_disabled


class Run(NamedTuple):
    """What a call returned and what it allocated.

    Attributes:
        workspace_bytes: Peak during the call beyond what it left allocated; None where that cannot be measured.
        made_bytes: What it left allocated; on CUDA negative if it freed more than it made. None as above.
    """

    result: Any
    workspace_bytes: int | None
    made_bytes: int | None


@dataclass(frozen=True)
class Times:
    """Samples of one method, in the order taken.

    Attributes:
        quartiles: First and third, milliseconds.
    """

    median_ms: float
    quartiles: tuple[float, float]
    samples_ms: tuple[float, ...]

    @staticmethod
    def of(samples_ms: list[float]) -> Times:
        if len(samples_ms) == 1:
            return Times(samples_ms[0], (samples_ms[0], samples_ms[0]), tuple(samples_ms))
        first, median, third = statistics.quantiles(samples_ms, n=4, method="inclusive")
        return Times(median, (first, third), tuple(samples_ms))


# Set while ``peak_bytes`` measures on CUDA: another measurement inside would reset its counter.
_cuda_busy = False


def peak_bytes(fn: Callable[[], Any], device: str | torch.device = "cpu") -> int:
    """Return the allocator's peak while ``fn()`` runs, in bytes above what is live at its start.

    Raises:
        LowtideError: a profiler or another measurement is active on this thread (its events would be lost).
    """
    gc.collect()  # garbage freed during the call would count as memory that the call gave back
    with measuring(device) as counter:
        if counter is None:
            raise LowtideError(
                f"cannot measure a peak on {device}: a profiler or another measurement is already active here. "
                "Measure outside of it."
            )
        fn()
    return counter.peak


def run_with_workspace(fn: Callable[[], Any], device: str | torch.device = "cpu") -> Run:
    """Call ``fn`` once and return its result, the bytes it needed only meanwhile, and the bytes it left.

    On CPU about 0.15 ms beyond the call itself. While a profiler or ``peak_bytes`` is active ``fn`` runs all the same,
    unmeasured: both byte counts are None.
    """
    with measuring(device) as counter:
        result = fn()
    if counter is None:
        return Run(result, None, None)
    return Run(result, max(0, counter.peak - max(0, counter.left)), counter.left)


class _Counter:
    """Bytes above the start: ``peak`` during a measurement, ``left`` after it."""

    peak = 0
    left = 0


@contextmanager
def measuring(device: str | torch.device) -> Iterator[_Counter | None]:
    """Inside, allocations are counted; the counter's ``peak`` and ``left`` are there when the block ends.

    None instead of a counter where something else is measuring already.
    """
    cuda = torch.device(device).type == "cuda"
    if _cuda_busy if cuda else _autograd._profiler_enabled():
        yield None
        return
    counter = _Counter()
    with _count_cuda(counter, device) if cuda else _count_cpu(counter):
        yield counter


@contextmanager
def _count_cuda(counter: _Counter, device: str | torch.device) -> Iterator[None]:
    global _cuda_busy
    _cuda_busy = True
    try:
        # The caching allocator counts on the host, in program order: nothing to synchronise.
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        counter.peak = torch.cuda.max_memory_allocated(device) - before
        counter.left = torch.cuda.memory_allocated(device) - before
    finally:
        _cuda_busy = False


@contextmanager
def _count_cpu(counter: _Counter) -> Iterator[None]:
    # Arguments: state, input shapes, memory, stack, flops, modules, experimental.
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _autograd._enable_profiler_legacy(config)
    try:
        yield
    finally:
        threads = _autograd._disable_profiler_legacy()
    events = [e for thread in threads for e in thread if e.kind() == "memory_alloc"]
    if len(threads) > 1:  # within one thread they are in order already
        events.sort(key=lambda e: e.start_us())
    for event in events:
        counter.left += event.cpu_memory_usage()
        counter.peak = max(counter.peak, counter.left)


def compare_times(
    methods: dict[str, Callable[[], Any]],
    *,
    rounds: int = 7,
    warmup: int = 1,
    device: str | torch.device = "cpu",
    on_round: Callable[[int, int], None] | None = None,
    seed: int = 0,
) -> dict[str, Times]:
    """Time every method once a round, in a fresh random order each round, so that drift hits all alike.

    Args:
        methods: Name -> call. What a call returns is dropped before the next begins.
        rounds: Samples of each method; ``warmup`` more rounds before are thrown away.
        on_round: Called after each round, warm-up included, with rounds done and rounds in all.
        seed: Of the order.

    Returns:
        Milliseconds by name: process CPU time on CPU, elapsed time between events on CUDA.

    Raises:
        ValueError: ``rounds`` is not positive.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: nothing would be measured. Ask for 1 or more.")
    order = random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for done in range(warmup + rounds):
        for name in order.sample(sorted(methods), len(methods)):
            ms = time_ms(methods[name], device)
            if done >= warmup:
                samples[name].append(ms)
        if on_round is not None:
            on_round(done + 1, warmup + rounds)
    return {name: Times.of(taken) for name, taken in samples.items()}


def compare_with(
    baseline: Callable[[], Any],
    methods: dict[str, Callable[[], Any]],
    *,
    rounds: int = 7,
    device: str | torch.device = "cpu",
    on_round: Callable[[int, int], None] | None = None,
    seed: int = 0,
) -> tuple[Times, dict[str, Times], dict[str, Times]]:
    """Time methods beside a baseline that runs again after every second of them, in a fresh random order each round.

    Shared machines change speed within a minute. A ratio to the mean of the baseline just before and just after is
    about the method; a ratio of two medians is about the minutes as well.

    Returns:
        Milliseconds of the baseline, milliseconds by name, and ratios to the baseline by name (a ``Times`` of plain
        numbers). One round before the first is thrown away.

    Raises:
        ValueError: ``rounds`` is not positive.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: nothing would be measured. Ask for 1 or more.")
    order = random.Random(seed)
    plain: list[float] = []
    taken: dict[str, list[float]] = {name: [] for name in methods}
    ratios: dict[str, list[float]] = {name: [] for name in methods}
    for done in range(rounds + 1):
        names = order.sample(sorted(methods), len(methods))
        before = time_ms(baseline, device)
        for first in range(0, len(names), 2):
            pair = names[first : first + 2]
            spent = [time_ms(methods[name], device) for name in pair]
            after = time_ms(baseline, device)
            if done:
                plain.append(after)
                for name, ms in zip(pair, spent, strict=True):
                    taken[name].append(ms)
                    ratios[name].append(2 * ms / (before + after))
            before = after
        if on_round is not None:
            on_round(done + 1, rounds + 1)
    return (
        Times.of(plain),
        {name: Times.of(found) for name, found in taken.items()},
        {name: Times.of(found) for name, found in ratios.items()},
    )


def time_ms(fn: Callable[[], Any], device: str | torch.device = "cpu") -> float:
    """Return the milliseconds of one call of ``fn``: process CPU time, or CUDA events; no garbage collection inside."""
    cuda = torch.device(device).type == "cuda"
    gc.collect()
    with gc_disabled():
        if not cuda:
            start = time.process_time()
            fn()
            return (time.process_time() - start) * 1e3
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        begin.record()
        fn()
        end.record()
        torch.cuda.synchronize(device)
        return begin.elapsed_time(end)


def device_name(device: str | torch.device = "cpu") -> str:
    """What the device calls itself, so that plans and tables say where a number comes from."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] not in ("", "unknown") else platform.machine() or "cpu"


def available_bytes(device: str | torch.device = "cpu") -> int:
    """Return the bytes that PyTorch can still allocate on ``device`` now.

    On CUDA: free on the device, plus what the caching allocator holds unused. On CPU the least of: RAM available
    without swapping, what the control groups (v1 or v2) leave, what the address-space limit leaves.
    """
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limits = [psutil.virtual_memory().available, cgroup_available_bytes(), _address_space_left_bytes()]
    return max(0, min(left for left in limits if left is not None))


def cgroup_available_bytes(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return limit less usage of the tightest control group around this process; None where none has a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_name, usage_name, cache = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit_name, usage_name = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        # Every ancestor's limit holds too. Inside a container the path may not exist below its own mount.
        for folder in (group, *group.parents):
            if folder != root and root not in folder.parents:
                break
            limit, usage = _read_count(folder / limit_name), _read_count(folder / usage_name)
            if limit is not None and usage is not None:
                # Cold file cache is given back before anything is killed.
                left.append(limit - usage + _read_stat(folder / "memory.stat", cache))
    return min(left, default=None)


def _read_count(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or the word "max"
        return None


def _read_stat(path: Path, key: str) -> int:
    try:
        return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == key)
    except (OSError, StopIteration):
        return 0


def _address_space_left_bytes() -> int | None:
    try:
        import resource  # POSIX only
    except ImportError:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit - psutil.Process().memory_info().vms
