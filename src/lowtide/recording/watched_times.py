"""What the ops of a watched step took: on a device by events that nobody waits for, read when they are over.

Left out is the first run of each signature, in which kernels are loaded and compiled, and what the device waited for
launches: a watched step is slow to launch its ops, and most find a device that has nothing to run. Where an op ran only
once, its time is what its work takes at the rate of the timed ops of its class, and never more than its one run took.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from lowtide.device import values_off
from lowtide.device.names import device_name, is_accelerator
from lowtide.device.timing import OpenSpan, Span, Spans
from lowtide.estimation.op_classes import class_of
from lowtide.estimation.op_work import work_of
from lowtide.estimation.roofline import estimate
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.recording.tape_costs import tape_costs

_T = TypeVar("_T")
_MOST_WAITED = 0.75  # of what spans took: beyond that nobody can tell a launch from a kernel
_LEAST_SHARE = 0.1  # of its span is an op's own


class WatchedTimes:
    """Of one step.

    Attributes:
        last_s: Seconds that the host needed for the last op; on a device, to launch it.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = is_accelerator(device)
        self._spans = Spans(device)
        self._open: OpenSpan | None = None
        self._last: Span | None = None
        self._again: dict[int, list[Span]] = defaultdict(list)  # by signature
        self._first: dict[int, list[Span]] = defaultdict(list)  # watched, and slower

    def run(self, call: Callable[..., _T], args: tuple, kwargs: dict) -> _T:
        """What ``call`` returns, which is one op."""
        opened = self._spans.begin()
        result = call(*args, **kwargs)
        self._last = self._spans.end(opened)
        return result

    @property
    def last_s(self) -> float:
        return 0.0 if self._last is None else self._last.launch_s

    @property
    def launch_us(self) -> float | None:
        """What the host needs to launch an op, in the median; None where ops have no other time, as on a CPU."""
        spans = [span for spans in (self._again or self._first).values() for span in spans]
        return 1e6 * statistics.median(span.launch_s for span in spans) if self._spans.timed and spans else None

    def note(self, signature: int, *, is_first: bool) -> None:
        """The last op has this signature."""
        if self._last is not None:
            (self._first if is_first else self._again)[signature].append(self._last)

    def are_known(self) -> bool:
        """Whether reading them waits for nothing."""
        return self._spans.are_over()

    def milliseconds(self, graph: StepGraph) -> list[float]:
        """By op. Where they are not known yet: of the launches."""
        took = self._took()
        again, first = _medians(self._again, took), _medians(self._first, took)
        if self._on_device:
            first = {s: ms for s, ms in first.items() if s not in again}
            first |= _by_rate(graph, first, again)
        by_signature = {**first, **again, **graph.recorded_ms}
        return graph.with_completions([by_signature.get(op.signature, 0.0) for op in graph.ops])

    def _took(self) -> Callable[[Span], float]:
        """Milliseconds of a span, without waits; with them where they are most of all: launching may run a kernel."""
        if not self.are_known():
            return _launch_ms
        spans = [span for of_signature in self._again.values() for span in of_signature]
        waited_ms = sum(span.waited_ms() for span in spans)
        return _kernel_ms if waited_ms < _MOST_WAITED * sum(span.ms() for span in spans) else Span.ms

    def why_of_launches(self, graph: StepGraph) -> str:
        """Which times of ``graph`` are of launches alone, in a sentence; "" where none is."""
        if not self._on_device:
            return ""
        if not self._spans.timed:
            return "op times are those of launches, since the device has no events with times: overheads may be off"
        ops = [op for op in graph.ops if graph.recorded_ms.get(op.signature, 0.0) > 0.0]
        if not ops:
            return ""
        return (
            f"the times of {len(ops)} calls that are one op each ({ops[0].name} first) are those of their launches: "
            "what a plan says of its overhead may be off by as much as they take"
        )


def costs_of(graph: StepGraph, times: WatchedTimes) -> Costs:
    """What the ops of a watched step took, and what the tape's own work takes."""
    op_ms = _op_ms(graph, times)
    tape = tape_costs(graph, op_ms, times.launch_us)
    return Costs(
        op_ms=tuple(op_ms),
        dispatch_us=tape.dispatch_us,
        record_us=tape.record_us,
        replay_us=tape.replay_us,
        move_us=tape.move_us,
        source="watched",
        device_name=device_name(graph.device),
    )


def why_of_host(graph: StepGraph, costs: Costs, times: WatchedTimes) -> str:
    """That the host bounds a planned step of ``graph``, in a sentence; "" where it does not, or nobody knows yet.

    Args:
        costs: Those of ``times``.
    """
    return tape_costs(graph, costs.op_ms, times.launch_us).told() if times.are_known() else ""


def _op_ms(graph: StepGraph, times: WatchedTimes) -> Sequence[float]:
    return estimate(graph, device=values_off.times_of).op_ms if values_off.times_of else times.milliseconds(graph)


def _launch_ms(span: Span) -> float:
    return 1e3 * span.launch_s


def _kernel_ms(span: Span) -> float:
    ms = span.ms()
    return max(ms - span.waited_ms(), _LEAST_SHARE * ms)


def _medians(spans: Mapping[int, list[Span]], took: Callable[[Span], float]) -> dict[int, float]:
    return {signature: statistics.median(map(took, of_signature)) for signature, of_signature in spans.items()}


def _by_rate(graph: StepGraph, once: Mapping[int, float], timed: Mapping[int, float]) -> dict[int, float]:
    """Milliseconds of the signatures that ran ``once``, by the rates of those that were ``timed``."""
    made: dict[int, int] = {}
    for op in graph.ops:
        made[op.signature] = sum(graph.storages[s].bytes for s in op.makes)
    kinds = {class_of(graph.signatures[signature]["op"]) for signature in once}
    rates: dict[tuple[str, bool], float] = {}
    for signature, ms in timed.items():
        if class_of(graph.signatures[signature]["op"]) not in kinds:
            continue
        for key, amount in _amounts(graph.signatures[signature], made.get(signature, 0)):
            if ms > 0 and amount:
                rates[key] = max(rates.get(key, 0.0), amount / ms)
    found = {}
    for signature, most_ms in once.items():
        amounts = _amounts(graph.signatures[signature], made.get(signature, 0))
        needed = [amount / rates[key] for key, amount in amounts if key in rates]
        found[signature] = min(most_ms, max(needed, default=math.inf))
    return found


def _amounts(signature: Mapping[str, Any], made_bytes: int) -> list[tuple[tuple[str, bool], float]]:
    """What a call does, by what has a rate: its operations, or the bytes that it moves."""
    work = work_of(signature)
    amount = work.flops if work.computes else work.read_bytes + made_bytes
    return [((f"{work.kind}.{work.dtype}", work.computes), float(amount))]
