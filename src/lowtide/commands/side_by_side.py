"""Ways to run one training step, measured side by side: peaks, times in turns, and whether the bits are the same."""

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.graph.step_graph import StepGraph
from lowtide.measurement.allocator import peak_bytes
from lowtide.measurement.timing import Times, compare_times
from lowtide.options import Offload
from lowtide.plan import Plan
from lowtide.tape.attach import applied
from lowtide.tape.offload.open_tiers import open_tiers
from lowtide.tracing.restore import preserve_training_state, same_bits
from lowtide.tracing.tracer import Step, device_of, run_step
from lowtide.units import format_bytes

PLAIN = "plain"


@dataclass(frozen=True)
class Way:
    """One way to run the step: under a plan, or with something switched on around its forward pass."""

    name: str
    plan: Plan | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Row:
    """What was measured of one way.

    Attributes:
        peak_bytes: Absolute, with the gradients allocated beforehand.
        fraction: Activation memory as a share of the plain step's.
        time_ratio: Step time / time of the plain step in the same round, the median; quartiles beside it.
        bitwise_equal: Loss and gradients against the plain step's.
        predicted_peak_bytes, predicted_overhead: By the plan; None where there is none.
    """

    name: str
    peak_bytes: int
    fraction: float
    time_ratio: float
    time_ratio_quartiles: tuple[float, float]
    bitwise_equal: bool
    predicted_peak_bytes: int | None = None
    predicted_overhead: float | None = None

    @property
    def cells(self) -> list[str]:
        """As a line of a table, in the order of ``HEAD``."""
        predicted = self.predicted_peak_bytes
        overhead = self.predicted_overhead
        return [
            self.name,
            format_bytes(self.peak_bytes),
            "-" if predicted is None else format_bytes(predicted),
            f"{100 * self.fraction:.1f} %",
            f"{self.time_ratio:.2f}",
            "-" if overhead is None else f"{1 + overhead:.2f}",
            "yes" if self.bitwise_equal else "NO",
        ]


HEAD = ["", "peak", "predicted", "activations", "time", "predicted", "same bits"]


@dataclass(frozen=True)
class SideBySide:
    """One step of a user, to be run in several ways; the first has to be the plain one."""

    model: nn.Module
    batch: Any
    step: Step | None
    graph: StepGraph

    def rows(
        self, ways: list[Way], *, rounds: int = 5, progress: Callable[[int, int], None] | None = None
    ) -> list[Row]:
        """Measure every way. Gradients, buffers and random generators are afterwards as before."""
        peaks, equal = self._outcomes(ways)
        with self._rehearsal():
            calls: dict[str, Callable[[], Any]] = {way.name: partial(self._run, way) for way in ways}
            times = compare_times(calls, rounds=rounds, device=device_of(self.model), on_round=progress)
        resident = self.graph.resident_bytes
        plain_ms = times[PLAIN].samples_ms
        # Each sample by the plain step of its own round: what slows the machine down slows both.
        ratios = {name: Times.of([a / b for a, b in zip(t.samples_ms, plain_ms)]) for name, t in times.items()}
        return [
            Row(
                name=way.name,
                peak_bytes=resident + peaks[way.name],
                fraction=peaks[way.name] / peaks[PLAIN],
                time_ratio=ratios[way.name].median_ms,
                time_ratio_quartiles=ratios[way.name].quartiles,
                bitwise_equal=equal[way.name],
                predicted_peak_bytes=None if way.plan is None else way.plan.predicted_peak_bytes,
                predicted_overhead=None if way.plan is None else way.plan.predicted_overhead,
            )
            for way in ways
        ]

    def peak_bytes(self, way: Way) -> int:
        """Measured, absolute."""
        with self._rehearsal():
            return self.graph.resident_bytes + peak_bytes(partial(self._run, way), device_of(self.model))

    def _outcomes(self, ways: list[Way]) -> tuple[dict[str, int], dict[str, bool]]:
        peaks, equal = {}, {}
        reference: dict[str, Any] = {}
        for way in ways:
            with self._rehearsal():
                peaks[way.name] = peak_bytes(partial(self._run, way), device_of(self.model))
            with self._rehearsal("none"):
                found: dict[str, Any] = {"loss": self._run(way)}
                found |= {name: p.grad for name, p in self.model.named_parameters()}
            reference = reference or found
            equal[way.name] = _same(reference, found)
            del found
            gc.collect()
        return peaks, equal

    def _rehearsal(self, gradients: Any = "zeroed") -> AbstractContextManager[None]:
        written = self.graph.written_parameters
        return preserve_training_state(self.model, self.batch, gradients=gradients, written_parameters=written)

    def _run(self, way: Way) -> torch.Tensor:
        """One step as a training loop runs it; the random generators decide the same in each."""
        with torch.enable_grad():
            with self._around(way):
                loss, output = run_step(self.model, self.batch, self.step)
            loss.backward()
            del output
        return loss.detach()

    def _around(self, way: Way) -> AbstractContextManager[Any]:
        if way.plan is None:
            return way.around()
        return applied(self.model, way.plan, open_tiers(way.plan, Offload()))


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        a[name] is b[name] if a[name] is None or b[name] is None else same_bits(a[name], b[name]) for name in a
    )
