"""Milliseconds per op on this machine's device: each distinct signature is run on synthetic tensors and timed.

On a CPU a buffer is swept before each timed call, so that caches are as a step would leave them. Measured on a decoder,
element-wise ops took 1.2 to 2.6 times longer inside a step than repeated on the same inputs; with the sweep most agree
within a tenth (benchmarks/LOG.md). The tape's own Python depends on the caches too: a dispatch mode adds 25 to 50
microseconds to an op that follows one on large tensors, and 4 in a loop of small ones.

Known weaknesses. Large outputs may reuse memory that a real step has to fault in: with glibc's defaults loss heads look
cheaper than they are. Integer inputs are all zero, so a gather reads one row only. Ops that cannot run on synthetic
inputs are estimated from the bytes that they move, and named in a warning.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import BaseTorchDispatchMode

from lowtide.device.generators import forked
from lowtide.device.memory import is_short_of
from lowtide.device.names import check_is_here, device_name, is_accelerator
from lowtide.device.out_of_memory import is_out_of_memory, told_by_name
from lowtide.device.streams import synchronize
from lowtide.device.timing import calls_ms
from lowtide.errors import DeviceError
from lowtide.gc_control import gc_disabled
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import Op, StepGraph
from lowtide.measurement.links import measured_link
from lowtide.measurement.op_inputs import CollectiveError, NotRebuildableError, rebuild, tensor_bytes

# The tape's work beyond the mode's, on a server CPU in warm caches (benchmarks/overhead.py): per op of the step (module
# calls, what autograd saves), per dropped op, per replayed op.
WATCH_US = 6.0
RECORD_US = 6.0
REPLAY_US = 5.0

_SIGNATURE_S = 0.2  # time for one signature, as long as three samples fit
_SLOW_S = 0.5  # an op this slow is sampled once
_SAMPLE_S = 0.0005  # calls shorter than this are repeated inside a sample: clocks and events have a grain
_MAX_CALLS = 50
_COPY_BYTES = 1 << 25
SWEPT_BYTES = 1 << 24  # about what a step moves between two uses of a tensor: some of a last-level cache survives it
_CACHED_BYTES = 1 << 18  # calls on less than this cost what the dispatcher costs, wherever their data is
_REBUILDING_BYTES = 1 << 18  # what making one op's inputs may take besides them
_MODE_CALLS = 400
_COLD_SAMPLES = 41
_GUARDED_BYTES = 1 << 26  # inputs this large are made only if the memory is available

_log = logging.getLogger(__name__)


class EstimateWarning(UserWarning):
    """Some times are estimates: their ops could not be run on synthetic inputs."""


def measure(
    graph: StepGraph,
    *,
    repeats: int = 5,
    progress: Callable[[int, int], None] | None = None,
    tiers: Iterable[str] = (),
    scratch_dir: str | Path | None = None,
    refresh: bool = False,
    memory_bytes: int | None = None,
) -> Costs:
    """Return the costs of ``graph`` on this machine: milliseconds of each op, microseconds of the tape's own work.

    Each distinct op signature is timed once, alone, on synthetic tensors. On CPU that is processor time with one thread
    and wall time with several, on an accelerator the time between two events. The random state of
    torch, gradients and the model stay untouched.

    Args:
        graph: A traced step; its signatures say what to time.
        repeats: Samples of each signature; fewer (at least three) where an op is slow, one from half a second on.
        progress: Called after each signature with the number done and the number in all.
        tiers: Also measure the links to these tiers (``host``, ``disk``). Their speeds are kept for a week in the
            user's cache directory, by machine, device and file system.
        scratch_dir: Where the disk tier is; by default the system's directory for temporary files.
        refresh: Measure the links even if the cache directory has their speeds.
        memory_bytes: Bytes that may be taken beside what lives. Caches are swept with what an op leaves of them; an op
            that needs more on its own is timed all the same.

    Returns:
        Costs with ``source="measured"``. Equal signatures have equal times. The time of an in-place op that completes
        another op's output is added to that op's.

    Raises:
        DeviceError: ``graph`` was traced for a device that is not here.
        TierError: this machine has no such tier, or it cannot be used.
        ValueError: ``repeats`` is not positive, or a tier is not known.
        RehearsalMemoryError: the device has no memory left to time anything.

    Warns:
        EstimateWarning: once, naming ops whose times are estimated from the bytes that they move.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: nothing would be measured. Ask for 1 or more.")
    try:
        check_is_here(graph.device)
    except DeviceError as error:
        raise DeviceError(f"the graph was traced for {graph.device}: {error} Measure where the device is.") from None
    links = {tier: measured_link(tier, graph.device, scratch_dir, refresh=refresh) for tier in tiers}
    ops_by_signature: dict[int, list[Op]] = defaultdict(list)
    for op in graph.ops:
        ops_by_signature[op.signature].append(op)
    signature_ms: dict[int, float] = {}
    failed: dict[int, str] = {}  # why a signature's time is an estimate; "" where that needs no warning
    way_out = "Free memory on the device first, or use costs that were measured before."
    with told_by_name("ops were timed", way_out), _quiet(graph.device):
        clock = _Clock(graph.device, memory_bytes)
        for done, (index, ops) in enumerate(sorted(ops_by_signature.items()), start=1):
            try:
                clock.leave(max(sum(graph.storages[s].bytes for s in op.makes) + op.workspace_bytes for op in ops))
                signature_ms[index] = _signature_ms(graph, index, clock, repeats)
            except CollectiveError:  # never replayed, so its time changes no plan
                failed[index] = ""
            except Exception as error:  # whatever a kernel raises on inputs it was not meant for
                failed[index] = f"{ops[0].name}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
            if progress is not None:
                progress(done, len(ops_by_signature))
        clock.leave(0)
        warm_us, dispatch_us = _dispatch_us(graph, clock)
        copy_ms = _copy_ms(clock) if failed else 0.0
        for index in failed:
            moved = max(graph.moved_bytes(op) for op in ops_by_signature[index])
            signature_ms[index] = clock.floor_ms + copy_ms * moved / (2 * clock.copied_bytes)
    if reasons := sorted(set(failed.values()) - {""}):
        _warn(reasons, sum(len(ops_by_signature[i]) for i, why in failed.items() if why), len(graph.ops))
    op_ms = graph.with_completions([signature_ms[op.signature] for op in graph.ops])
    cold_factor = dispatch_us / warm_us if warm_us else 1.0
    return Costs(
        op_ms=tuple(op_ms),
        dispatch_us=dispatch_us + WATCH_US,
        record_us=RECORD_US * cold_factor,
        replay_us=REPLAY_US * cold_factor,
        source="measured",
        device_name=device_name(graph.device),
        links=links,
    )


def _signature_ms(graph: StepGraph, index: int, clock: _Clock, repeats: int) -> float:
    if not graph.signatures:
        raise NotRebuildableError("the graph carries no signatures.")
    signature = graph.signatures[index]
    if index in graph.recorded_ms:
        return graph.recorded_ms[index]
    needed = tensor_bytes(signature)
    if needed > _GUARDED_BYTES and is_short_of(2 * needed, graph.device):
        raise NotRebuildableError(f"its inputs need {needed} bytes, which are not free here.")
    clock.leave(needed, beside=True)
    func, args, kwargs = rebuild(signature, graph.device)
    if torch.Tag.inplace_view in func.tags:
        # A second call would find another shape. The op changes only metadata, so it takes the time of any view.
        return clock.floor_ms
    return clock.median_ms(lambda: func(*args, **kwargs), repeats, cold=needed >= _CACHED_BYTES)


class _Clock:
    """Times calls as ``measure`` says, in ``memory_bytes``; ``floor_ms`` is the time of a view."""

    def __init__(self, device: str, memory_bytes: int | None = None) -> None:
        self.device = torch.device(device)
        self.on_accelerator = is_accelerator(device)
        # With several threads processor time is their sum, but a user waits for the slowest.
        self.now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        self._memory_bytes = None if memory_bytes is None else memory_bytes - _REBUILDING_BYTES
        self._taken_bytes = 0  # by the op that is timed
        self._swept = torch.zeros(0, dtype=torch.uint8, device="cpu")
        spare_bytes = _COPY_BYTES if memory_bytes is None else memory_bytes // 3
        self.copied_bytes = max(_CACHED_BYTES, min(_COPY_BYTES, spare_bytes))
        x = torch.empty(1, device=self.device)
        self.floor_ms = self.median_ms(lambda: torch.ops.aten.alias.default(x), 5)

    def median_ms(self, fn: Callable[[], Any], repeats: int, *, cold: bool = False) -> float:
        """Return the median of up to ``repeats`` samples; ``cold``: with the CPU's caches swept before each call."""
        first_s = self.sample_ms(fn, 1) / 1e3
        if first_s >= _SLOW_S:  # the first call may include lazy set-up, so it is not the sample
            return self.sample_ms(fn, 1)
        if first_s < _SLOW_S / 10:
            first_s = self.sample_ms(fn, 1) / 1e3
        cold &= not self.on_accelerator
        calls = 1 if cold else max(1, min(_MAX_CALLS, int(_SAMPLE_S / max(first_s, 1e-9))))
        fitting = int(_SIGNATURE_S / max(first_s * calls, 1e-9))
        samples = []
        for _ in range(max(min(3, repeats), min(repeats, fitting))):
            if cold:
                self.sweep()
            samples.append(self.sample_ms(fn, calls))
        return statistics.median(samples)

    def leave(self, taken_bytes: int, *, beside: bool = False) -> None:
        """The next op takes so many bytes, or so many more: sweep with what is left."""
        self._taken_bytes = taken_bytes + beside * self._taken_bytes
        if self._memory_bytes is not None and self._swept.numel() > self._memory_bytes - self._taken_bytes:
            self._swept = torch.zeros(0, dtype=torch.uint8, device="cpu")

    def sweep(self) -> None:
        left_bytes = SWEPT_BYTES if self._memory_bytes is None else self._memory_bytes - self._taken_bytes
        size = max(0, min(SWEPT_BYTES, left_bytes))
        if self._swept.numel() < size:
            self._swept = torch.zeros(0, dtype=torch.uint8, device="cpu")  # not two at once
            self._swept = torch.zeros(size, dtype=torch.uint8, device="cpu")
        self._swept.add_(1)

    def sample_ms(self, fn: Callable[[], Any], calls: int) -> float:
        return calls_ms(fn, calls, self.device, self.now)


def _copy_ms(clock: _Clock) -> float:
    while True:
        try:
            source, target = torch.zeros(2, clock.copied_bytes, dtype=torch.uint8, device=clock.device)
            return clock.median_ms(partial(target.copy_, source), 5)
        except Exception as error:
            if not is_out_of_memory(error) or clock.copied_bytes <= _CACHED_BYTES:
                raise
        clock.copied_bytes //= 2


def _dispatch_us(graph: StepGraph, clock: _Clock) -> tuple[float, float]:
    """Microseconds that an empty dispatch mode adds to an op: in warm caches, and in ``graph``."""
    x = torch.zeros(1, device=clock.device)

    def added_us(calls: int, samples: int, *, cold: bool) -> float:
        plain: list[float] = []
        under_mode: list[float] = []
        for _ in range(samples):
            for spent, mode in ((plain, nullcontext()), (under_mode, BaseTorchDispatchMode())):
                synchronize(x.device)
                if cold:
                    clock.sweep()
                with mode:
                    start = time.process_time()
                    for _ in range(calls):
                        torch.add(x, x)
                    spent.append((time.process_time() - start) * 1e6 / calls)
        return max(0.0, statistics.median(under_mode) - statistics.median(plain))

    warm_us = added_us(_MODE_CALLS, 5, cold=False)
    if clock.on_accelerator:
        return warm_us, warm_us
    # Forward ops that leave the caches full of their own data. A view moves no bytes.
    large = [bool(op.makes or op.writes) and graph.moved_bytes(op) >= _CACHED_BYTES for op in graph.forward_ops]
    share = sum(large) / max(len(large), 1)
    cold_us = added_us(1, _COLD_SAMPLES, cold=True) if share else 0.0
    return warm_us, max(warm_us, share * cold_us + (1 - share) * warm_us)


@contextmanager
def _quiet(device: str) -> Iterator[None]:
    """No autograd, autocast or garbage collection; torch's random state is put back afterwards."""
    kind = torch.device(device).type
    gc.collect()
    with (
        forked(torch.device(device)),
        torch.no_grad(),
        torch.autocast(kind, enabled=False),
        gc_disabled(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # warnings of kernels about synthetic inputs do not concern the user
        yield


def _warn(reasons: list[str], num_estimated: int, num_ops: int) -> None:
    for reason in reasons:
        _log.info("estimated: %s", reason)
    shown = "".join(f"\n  {reason[:160]}" for reason in reasons[:5])
    more = f"\n  and {len(reasons) - 5} more (logged by {__name__})" if len(reasons) > 5 else ""
    warnings.warn(
        f"{num_estimated} of {num_ops} op times are estimates from the bytes they move, not measured:{shown}{more}",
        EstimateWarning,
        stacklevel=3,
    )
