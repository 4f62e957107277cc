"""``estimate``: op times of a device that is not here, by a roofline with efficiencies for each class of op and size.

    Williams, Waterman and Patterson 2009, "Roofline", CACM 52(4), https://doi.org/10.1145/1498765.1498785

An op takes as long as its arithmetic or its bytes, whichever is longer, and never less than a launch. Differs: neither
peak is reached by small ops, so each is multiplied by an efficiency that grows with the size. For devices of the table
they are those of published measurements (``_GPU``, ``_BY_CAPABILITY``); ``docs/published.md`` compares whole steps.
Where operators were measured on the very device, those come first (``Device.shares``, ``Device.elements_per_s``). For
the device ``here`` they were measured by ``lowtide calibrate``.

Known weaknesses: cuDNN's choice of a convolution, wave quantisation, power limits and caches are not modelled.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lowtide.errors import LowtideError
from lowtide.estimation.device_table import Device, device_named
from lowtide.estimation.op_classes import COMPUTE
from lowtide.estimation.op_work import CACHED_BYTES, Work, work_of
from lowtide.graph.costs import HOST, Costs, Link
from lowtide.graph.step_graph import Op, StepGraph

# Share of the peak by the time that the op would take at the peak, in microseconds. Large matrix products reach 70 to
# 80 % in short benchmarks (https://github.com/stas00/ml-engineering/tree/master/compute/accelerator/benchmarks), copies
# about 90 %; the small ends are assumed.
_GPU: dict[str, tuple[tuple[float, float], ...]] = {
    "matmul": ((1, 0.1), (10, 0.4), (100, 0.65), (1000, 0.75)),
    "conv": ((1, 0.07), (10, 0.3), (100, 0.5), (1000, 0.6)),
    "attention": ((1, 0.07), (10, 0.25), (100, 0.4), (1000, 0.45)),
    "gather": ((1, 0.2), (10, 0.35), (100, 0.5)),
    "norm": ((1, 0.25), (10, 0.55), (100, 0.7)),
    "softmax": ((1, 0.25), (10, 0.6), (100, 0.8)),
    "reduction": ((1, 0.25), (10, 0.55), (100, 0.75)),
}
# By compute capability, where it is known better. Long runs at a device's power limit reach less than short ones: the
# shares of matrix products are those at which one step of training took as long as published, a 7B model of 6 x 2048
# tokens (https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md). Attention: forward
# and backward of FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691, figures 4 to 7; Shah et al. 2024,
# https://arxiv.org/abs/2407.08608, for the H100), less as much. B200: assumed to be as the H100.
_HOPPER: dict[str, tuple[tuple[float, float], ...]] = {
    "matmul": ((1, 0.07), (10, 0.28), (100, 0.45), (1000, 0.52)),
    "attention": ((1, 0.05), (10, 0.17), (100, 0.25), (1000, 0.28)),
}
_BY_CAPABILITY: dict[float, dict[str, tuple[tuple[float, float], ...]]] = {
    8.0: {"matmul": ((1, 0.1), (10, 0.37), (100, 0.6), (1000, 0.69))},
    9.0: _HOPPER,
    10.0: _HOPPER,
}
_MEMORY = ((1.0, 0.3), (10.0, 0.7), (100.0, 0.88))
LAUNCH_US = 4.0  # a kernel that does nothing, launched after another
HOST_US = 12.0  # Python, autograd and the dispatcher for one op of a step that is not compiled
LINK_SHARE = 0.8  # of a link's peak that pinned copies reach
_TAPE_US = 6.0  # what the tape adds to an op: see lowtide.measurement.op_times


def estimate(graph: StepGraph, *, device: str | Device = "here") -> Costs:
    """Return the costs of ``graph`` on a device that need not be here.

    Args:
        graph: A traced step; its signatures say what its ops compute.
        device: A name of the table (``estimation/devices/``), or ``"here"`` once ``lowtide calibrate`` has run.

    Returns:
        Costs with ``source="estimated"``; ``plain_step_ms`` may be off by ``error_fraction``. The link to host memory
        is among ``links``.

    Raises:
        UnknownDeviceError: no such device; the message has the nearest names.
        LowtideError: the graph carries no signatures.
    """
    target = device if isinstance(device, Device) else device_named(device)
    if graph.ops and not graph.signatures:
        raise LowtideError("the graph carries no signatures, so nothing says what its ops compute. Trace it again.")
    works: dict[int, Work] = {}
    op_ms = []
    for op in graph.ops:
        if op.signature not in works:
            works[op.signature] = work_of(graph.signatures[op.signature])
        op_ms.append(_op_ms(graph, op, works[op.signature], target))
    if target.kind != "cpu":
        # The host launches ahead. Where it cannot, the device waits for it, and all ops seem slower alike.
        op_ms = _no_faster_than_the_host(op_ms)
    link_bytes_per_s = LINK_SHARE * target.host_link_bytes_per_s
    return Costs(
        op_ms=tuple(graph.with_completions(op_ms)),
        dispatch_us=2 * _TAPE_US,
        record_us=_TAPE_US,
        replay_us=_TAPE_US,
        source="estimated",
        device_name=target.title,
        links={} if target.kind == "cpu" else {HOST: Link(link_bytes_per_s, link_bytes_per_s, 0.02)},
        error_fraction=target.error_fraction,
    )


def _op_ms(graph: StepGraph, op: Op, work: Work, device: Device) -> float:
    floor_us = LAUNCH_US if device.op_us is None else device.op_us
    if not op.makes and not op.writes:  # a view
        cold_us = device.cold_us if work.read_bytes >= CACHED_BYTES else 0.0
        return 0.0 if device.op_us is None else (floor_us + cold_us) / 1e3
    moved = work.read_bytes + sum(graph.storages[s].bytes for s in op.makes)
    if op.writes and not op.makes:  # in place: written as large as it was read
        moved += min(work.read_bytes, max(graph.storages[s].bytes for s in op.writes))
    took_s = max(compute_s(work, device), memory_s(work, moved, device))
    # A measured device's floor is the host's work, which nothing overlaps; an accelerator's is the launch itself.
    return max(floor_us / 1e3, took_s * 1e3) if device.op_us is None else floor_us / 1e3 + took_s * 1e3


def call_ms(signature: Mapping[str, Any], made_bytes: int, device: Device) -> float:
    """Milliseconds of one kernel of ``device`` that makes so many bytes, launched after another."""
    work = work_of(signature)
    took_s = max(compute_s(work, device), memory_s(work, work.read_bytes + made_bytes, device))
    return max(LAUNCH_US / 1e3, took_s * 1e3)


def moved_ms(moved_bytes: int, device: Device) -> float:
    """Milliseconds in which ``device`` reads and writes so many bytes, elementwise."""
    at_peak_s = moved_bytes / device.bandwidth_bytes_per_s
    return 1e3 * at_peak_s / between(_MEMORY, at_peak_s * 1e6)


def compute_s(work: Work, device: Device) -> float:
    """Seconds of the arithmetic; 0 where bytes are what takes the time."""
    if not work.computes:
        return 0.0
    if device.rates:
        return work.flops / _measured_rate(device, work.keys, work.flops / work.problems)
    # cuDNN may round float32 to tf32, and does by default; matrix products may not.
    dtype = "tf32" if work.kind == "conv" and work.dtype == "float32" and "tf32" in device.matrix_flops else work.dtype
    at_peak_s = work.flops / device.flops_per_s(dtype)
    own = _own_shares(work, device)
    shares = own or _BY_CAPABILITY.get(device.compute_capability or 0.0, {}).get(work.kind, _GPU[work.kind])
    return at_peak_s / between(shares, at_peak_s * 1e6)


def memory_s(work: Work, moved: int, device: Device) -> float:
    """Seconds of ``moved`` bytes, read and written."""
    if not moved:
        return 0.0
    if device.rates:  # those of products were measured with the bytes that they move
        keys = () if work.kind in COMPUTE else work.keys
        return 0.0 if work.computes else moved / _measured_rate(device, (*keys, f"elementwise.{work.dtype}"), moved)
    at_peak_s = moved / device.bandwidth_bytes_per_s
    own = None if work.kind in COMPUTE else _own_shares(work, device)
    shares = own or (_MEMORY if work.kind in COMPUTE else _GPU.get(work.kind, _MEMORY))
    took_s = at_peak_s / between(shares, at_peak_s * 1e6)
    return max(took_s, work.elements / device.elements_per_s.get(work.access, math.inf))


def _own_shares(work: Work, device: Device) -> tuple[tuple[float, float], ...] | None:
    """Those that were measured on this very device, of the closest class."""
    names = (f"{work.kind}_odd",) if work.is_odd else ()
    for key in (*names, *work.keys, *((f"{work.kind}_{work.variant}",) if work.variant else ()), work.kind):
        if points := device.shares.get(key):
            return points
    return None


def _measured_rate(device: Device, keys: Sequence[str], amount: float) -> float:
    for key in (*keys, "elementwise.float32"):
        if points := device.rates.get(key):
            return between(points, amount)
    raise LowtideError(f"device {device.name!r} has no measured rates. Measure again: lowtide calibrate")


def between(points: Sequence[tuple[float, float]], x: float) -> float:
    """``points`` interpolated at ``x``, straight in the logarithms of both; flat outside."""
    if x <= points[0][0]:
        return points[0][1]
    if x >= points[-1][0]:
        return points[-1][1]
    i = bisect.bisect_right([p[0] for p in points], x)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    share = math.log(x / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + share * math.log(y1 / y0))


def _no_faster_than_the_host(op_ms: list[float]) -> list[float]:
    on_device = sum(op_ms)
    on_host = len(op_ms) * HOST_US / 1e3
    return op_ms if not on_device or on_device >= on_host else [ms * on_host / on_device for ms in op_ms]
