"""What a step takes on the device: the recorded step, played by the clock, and what is said of it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from lowtide.estimation.device_table import Device
from lowtide.pretending.links import links_of
from lowtide.pretending.op_times import OpTimes
from lowtide.pretending.settings import Measured, PretendError
from lowtide.pretending.step_clock import PlayedStep, play
from lowtide.pretending.step_record import StepRecord

# How far a step may be off, by compute capability: what nine of ten rows of docs/pretend-time.md stay within.
_ERROR = {7.0: 0.25, 8.0: 0.1, 9.0: 0.16}
# The same of its comparisons: what was measured of a script says of a variation of it.
_ERROR_OF_MEASURED = 0.06
_SLOWEST, _FASTEST = 0.2, 2.0  # shares of the table's speed between which a measured one is looked for
_SHOWN = 8
_FEWEST_FACTOR = 1e-3


@dataclass(frozen=True)
class StepTime:
    """What one step takes.

    Attributes:
        busy_ms: Kernels alone; ``host_ms`` is the host's own time, ``waited_ms`` how long it waited for the device.
        communication_ms: Collectives; ``exposed_communication_ms`` is what the main stream waited for them.
        launch_bound: Share of the step in which the device had nothing to do because the host had launched nothing yet.
        lost_ms: Why the main stream stood still.
        by_kind_ms: What kernels, copies and collectives took.
        slowest: The operators that take most: name, milliseconds, calls.
        flops: Of matrix products, convolutions and attention; ``model_flops`` are three times those of forward, at most
            all: without what is computed again.
        hfu, mfu: Their shares of what the data sheet promises in 16 bits.
        tokens: In a step of this rank, as told or as read from the largest embedding; None: not known.
        speed: Of matrix products and attention, as a share of the table's.
        is_anchored: ``speed`` is from a measured step.
        error_fraction: How far the step may be off; with a measured step, how far a variation of the script may be.
    """

    step_ms: float
    busy_ms: float
    host_ms: float
    waited_ms: float
    communication_ms: float
    exposed_communication_ms: float
    launch_bound: float
    lost_ms: dict[str, float]
    by_kind_ms: dict[str, float]
    slowest: tuple[tuple[str, float, int], ...]
    flops: float
    model_flops: float
    hfu: float
    mfu: float
    tokens: int | None
    speed: float
    is_anchored: bool
    error_fraction: float

    @property
    def tokens_per_second(self) -> float | None:
        """Of one device."""
        return self.tokens / self.step_ms * 1e3 if self.tokens else None


def step_time(
    record: StepRecord, device: Device, *, tokens: int | None = None, anchor: Measured | None = None,
    network_bits_per_s: float | None = None,
) -> StepTime:  # fmt: skip
    """Return what ``record`` takes on ``device``.

    Args:
        tokens: In a step of this rank; None: read from the largest embedding, where there is one.
        anchor: A measured step, by which matrix products and attention are made faster or slower alike.
        network_bits_per_s: Of each device to other machines; None: as clouds have it.

    Raises:
        PretendError: No speed of matrix products explains ``anchor``.
    """
    times = OpTimes(record, device, links_of(device, network_bits_per_s))
    tokens = tokens or _tokens(record)
    speed = 1.0
    if anchor is not None:
        speed = anchor.amount if anchor.unit == "speed" else _speed_for(times, anchor.step_ms(tokens))
    played = _played(times, speed)
    flops, forward, dtypes = _flops(times)
    peak = device.flops_per_s(dtypes.most_common(1)[0][0] if dtypes else "bfloat16")
    step_s = played.step_us / 1e6
    model_flops = min(flops, 3 * forward)
    lost = {name: us / 1e3 for name, us in played.lost_us.items()}
    return StepTime(
        step_ms=played.step_us / 1e3,
        busy_ms=played.busy_us / 1e3,
        host_ms=played.host_us / 1e3,
        waited_ms=played.waited_us / 1e3,
        communication_ms=played.communication_us / 1e3,
        exposed_communication_ms=lost.get("communication", 0.0),
        launch_bound=played.lost_us.get("host", 0.0) / played.step_us,
        lost_ms=lost,
        by_kind_ms={name: us / 1e3 for name, us in played.by_name_us.items()},
        slowest=_slowest(times, speed),
        flops=flops,
        model_flops=model_flops,
        hfu=flops / step_s / peak,
        mfu=model_flops / step_s / peak,
        tokens=tokens,
        speed=speed,
        is_anchored=anchor is not None,
        error_fraction=stated_error(device, anchor),
    )


def stated_error(device: Device, anchor: Measured | None) -> float:
    """How far a step, or with ``anchor`` a variation of it, may be off."""
    if anchor is not None and anchor.unit != "speed":
        return _ERROR_OF_MEASURED
    return _ERROR.get(device.compute_capability or 0.0, device.error_fraction)


def _played(times: OpTimes, speed: float) -> PlayedStep:
    return play(times.tasks(speed), times.record.host_ns / 1e3)


def _speed_for(times: OpTimes, step_ms: float) -> float:
    """By bisection: steps get shorter with the speed."""
    low, high = _SLOWEST, _FASTEST
    for speed, is_too_long in ((low, False), (high, True)):
        took = _played(times, speed).step_us / 1e3
        if (took > step_ms) == is_too_long and took != step_ms:
            raise PretendError(
                f"the measured step takes {step_ms:.1f} ms; with matrix products at {speed:.0%} of their speed in the "
                f"table it would take {took:.1f} ms. Was it this script, on this device, with these ranks?"
            )
    while high / low > 1 + _FEWEST_FACTOR:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _played(times, middle).step_us / 1e3 > step_ms else (low, middle)
    return math.sqrt(low * high)


def _flops(times: OpTimes) -> tuple[float, float, Counter[str]]:
    """Of the step, of its forward (what the script's own thread calls), and by dtype."""
    every = forward = 0.0
    dtypes: Counter[str] = Counter()
    for entry in times.all_entries():
        if entry.kind not in ("op", "kernel"):
            continue
        time = times.op_time(entry)
        every += time.flops
        forward += 0 if entry.d else time.flops
        dtypes[time.dtype] += int(time.flops)
    return every, forward, dtypes


def _slowest(times: OpTimes, speed: float) -> tuple[tuple[str, float, int], ...]:
    taken: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for entry in times.all_entries():
        if entry.kind in ("op", "kernel"):
            told: dict[str, Any] = times.record.signatures[entry.a] if entry.a >= 0 else {"op": "kernel"}
            name = told.get("name") or told["op"].removesuffix(".default")
            taken[name] += times.op_time(entry).us(speed)
            calls[name] += 1
    most = sorted(taken.items(), key=lambda item: -item[1])[:_SHOWN]
    return tuple((name, us / 1e3, calls[name]) for name, us in most)


def _tokens(record: StepRecord) -> int | None:
    """Ids that the largest embedding was asked for in forward; None: there is none that runs as an operator."""
    found: Counter[int] = Counter()
    for entry in record.entries:
        if entry.kind != "op" or entry.d:
            continue
        told = record.signatures[entry.a]
        if told["op"] != "aten.embedding.default":
            if told["op"] == "aten.index_select.default" and len(told["args"][0].get("t", ())) == 2:
                table, ids = told["args"][0], told["args"][2]
                found[math.prod(table["t"])] += math.prod(ids["t"])
            continue
        table, ids = told["args"][:2]
        found[math.prod(table["t"])] += math.prod(ids["t"])
    return found[max(found)] if found else None
