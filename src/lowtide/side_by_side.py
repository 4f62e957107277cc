"""Ways to run one training step, measured side by side: peaks, times in turns, and whether the bits are the same."""

import gc
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.device.autocast import outside_autocast
from lowtide.device.memory import release_cached_memory, reserved_bytes
from lowtide.device.names import is_accelerator
from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.measurement.allocator import peak_bytes
from lowtide.measurement.timing import Times, compare_times
from lowtide.options import Offload
from lowtide.plan import Plan
from lowtide.simulation.allocator_peaks import MOST_STEPS
from lowtide.solvers.dispatch import solve
from lowtide.step.bits import same_bits
from lowtide.step.operators import gradient_of, is_wrapper_type
from lowtide.step.restore import Gradients, preserve_training_state
from lowtide.step.subclasses import plain_tensors, wrapped_parameters
from lowtide.tape.attach import applied
from lowtide.tape.offload.open_tiers import open_tiers
from lowtide.tape.offload.tiers import Tiers
from lowtide.tape.tape import Counts
from lowtide.tracing.model_facts import device_of
from lowtide.tracing.tracer import Step, run_step
from lowtide.units import format_bytes

PLAIN = "plain"
_LET_GO_S = 0.005  # a device's thread frees the last objects of a backward up to 2 ms after it
_PEAK_REPEATS = 3  # measurements of the peak of a step that communicates


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
        time_ms: Median; process time on a CPU.
        time_ratio: Step time / time of the plain step in the same round, the median; quartiles beside it.
        bitwise_equal: Loss and gradients against the plain step's.
        budget_bytes, predicted_peak_bytes, predicted_overhead: Of the plan; None where there is none.
    """

    name: str
    peak_bytes: int
    fraction: float
    time_ms: float
    time_ratio: float
    time_ratio_quartiles: tuple[float, float]
    bitwise_equal: bool
    budget_bytes: int | None = None
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


_OF_PLAN = ("budget_bytes", "predicted_peak_bytes", "predicted_overhead")
HEAD = ["", "peak", "predicted", "activations", "time", "predicted", "same bits"]


@dataclass(frozen=True)
class SideBySide:
    """One step of a user, to be run in several ways.

    Attributes:
        traced: The step's graph or a plan for it: what is resident, and which parameters the step writes.
        tiers: Where the plans move tensors; None: where they do by default.
    """

    model: nn.Module
    batch: Any
    step: Step | None
    traced: StepGraph | Plan
    tiers: Tiers | None = None

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def rows(
        self, ways: list[Way], *, rounds: int = 5, warmup: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> list[Row]:
        """Measure every way, the plain one first. Gradients, buffers and generators are afterwards as before."""
        peaks, equal = {}, {}
        reference: dict[str, Any] = {}
        for way in ways:
            peaks[way.name] = self.peak_bytes(way)
            found, _ = self.outcome(way)
            reference = reference or found
            equal[way.name] = not any(not name.startswith("buffer ") for name in differing(reference, found))
            del found
            gc.collect()
        times = self.times(ways, rounds, warmup, progress)
        plain_ms = times[PLAIN].samples_ms
        # Each sample by the plain step of its own round: what slows the machine down slows both.
        ratios = {name: Times.of([a / b for a, b in zip(t.samples_ms, plain_ms)]) for name, t in times.items()}
        resident = self.traced.resident_bytes
        whole = max(peaks[PLAIN] - resident, 1)
        return [
            Row(
                name=way.name,
                peak_bytes=peaks[way.name],
                fraction=(peaks[way.name] - resident) / whole,
                time_ms=times[way.name].median_ms,
                time_ratio=ratios[way.name].median_ms,
                time_ratio_quartiles=ratios[way.name].quartiles,
                bitwise_equal=equal[way.name],
                **{name: getattr(way.plan, name, None) for name in _OF_PLAN},
            )
            for way in ways
        ]

    def outcome(self, way: Way) -> tuple[dict[str, Any], Counts]:
        """Loss, gradients and buffers after one step from the present state, by name; and what the tape met."""
        with self.rehearsal("none"):
            loss, counts = self._run(way)
            found: dict[str, Any] = {"loss": loss.clone()}
            found |= {f"gradient of {n}": gradient_of(p) for n, p in self.model.named_parameters()}
            found |= {f"buffer {n}": b.detach().clone() for n, b in self.model.named_buffers()}
        return found, counts

    def peak_bytes(self, way: Way, unwritten: Collection[int] = ()) -> int:
        """Absolute; gradients are there beforehand, zeroed, or made in backward, as in the traced step.

        Args:
            unwritten: Ids of what needs no copy, which would lie between what is resident.

        Raises:
            LowtideError: the device's allocator keeps no statistics.
        """
        # Memory that the threads of a collective free is not seen to go: one measurement may err high, by chance.
        sharded = bool(wrapped_parameters(self.model))
        # All ranks run the same number of steps.
        run = partial(self.run if sharded else self._run_until_settled, way)
        # A prediction knows nothing of what others left cached, nor gradients of what lay in their place.
        release = release_cached_memory if is_accelerator(self.device) else lambda: None
        release()
        with self.rehearsal(unwritten=unwritten):
            release()
            peaks = [peak_bytes(run, self.device) for _ in range(_PEAK_REPEATS if sharded else 1)]
        return self._before_bytes + min(peaks)

    @property
    def _before_bytes(self) -> int:
        traced = self.traced
        return traced.start_bytes if isinstance(traced, StepGraph) else traced.before_bytes

    @property
    def _makes_gradients(self) -> bool:
        return self._before_bytes < self.traced.resident_bytes

    def _run_until_settled(self, way: Way) -> None:
        """Steps until one reserves nothing more, as ``allocator_peaks`` has them; on a CPU one."""
        for _ in range(MOST_STEPS):
            before = reserved_bytes(self.device)
            self.run(way)
            if reserved_bytes(self.device) == before:
                break
            time.sleep(_LET_GO_S)

    def times(
        self, ways: Iterable[Way], rounds: int, warmup: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Times]:
        """By name; see ``compare_times``."""
        calls: dict[str, Callable[[], Any]] = {way.name: partial(self.run, way) for way in ways}
        with self.rehearsal():
            return compare_times(calls, rounds=rounds, warmup=warmup, device=self.device, on_round=progress)

    def rehearsal(
        self, gradients: Gradients | None = None, unwritten: Collection[int] = ()
    ) -> AbstractContextManager[None]:
        """See ``preserve_training_state``; by default gradients are as they are before the traced step."""
        gradients = gradients or ("none" if self._makes_gradients else "zeroed")
        return preserve_training_state(
            self.model, self.batch, gradients=gradients, written_parameters=self.traced.written_parameters,
            unwritten=unwritten,
        )  # fmt: skip

    def run(self, way: Way) -> tuple[torch.Tensor, Counts]:
        """One step as a training loop runs it, backward outside of what is around the forward pass.

        Gradients that it made are gone afterwards, as ``zero_grad`` frees them.
        """
        found = self._run(way)
        if self._makes_gradients:
            for p in self.model.parameters():
                p.grad = None
        return found

    def _run(self, way: Way) -> tuple[torch.Tensor, Counts]:
        with torch.enable_grad():
            with self._around(way) as found:
                loss, output = run_step(self.model, self.batch, self.step)
            with outside_autocast():
                loss.backward()
            del output
        return loss.detach(), Counts() if way.plan is None else found.counts

    def _around(self, way: Way) -> AbstractContextManager[Any]:
        if way.plan is None:
            return way.around()
        tiers = open_tiers(way.plan, Offload()) if self.tiers is None else self.tiers
        return applied(self.model, way.plan, tiers)


def exact_or_least(graph: StepGraph, costs: Costs, budget: int | str) -> Plan:
    """The exact plan for ``budget``, or for the least peak that there is where that is more."""
    try:
        return solve(graph, costs, budget)
    except BudgetInfeasibleError as error:
        return solve(graph, costs, error.least_bytes)


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of ``a`` whose tensors have other bits in ``b``."""
    return [name for name, tensor in a.items() if not _same(tensor, b.get(name))]


def _same(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    if is_wrapper_type(type(a)):
        parts = zip(plain_tensors(a), plain_tensors(b), strict=True)
        return type(a) is type(b) and all(same_bits(*pair) for pair in parts)
    if a.layout is not torch.strided:
        return a.layout is b.layout and torch.equal(a.to_dense(), b.to_dense())
    return same_bits(a, b)
