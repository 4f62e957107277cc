"""Planned step against plain step: loss, every gradient, every buffer, bit by bit; predicted peak against measured."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.device.memory import is_short_of, release_cached_memory
from lowtide.device.out_of_memory import is_out_of_memory, let_go_of_frames
from lowtide.errors import BudgetInfeasibleError, RehearsalMemoryError
from lowtide.measurement.allocator import can_measure_peaks
from lowtide.measurement.op_times import measure
from lowtide.options import Offload, names_checked, offload_policy
from lowtide.plan import Plan
from lowtide.side_by_side import PLAIN, SideBySide, Way, differing
from lowtide.solvers.dispatch import solve
from lowtide.step import module_calls
from lowtide.step.batches import first_rows, rows, without_history
from lowtide.step.data_parallel import unwrapped
from lowtide.step.restore import versions
from lowtide.step.subclasses import wrapped_parameters
from lowtide.tape import attach
from lowtide.tape.offload.open_tiers import open_tiers
from lowtide.tape.offload.tiers import Tiers
from lowtide.tape.program import program_of
from lowtide.tracing.model_facts import device_of
from lowtide.tracing.tracer import Step, record
from lowtide.units import format_bytes


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found.

    Attributes:
        loss_bitwise_equal, gradients_bitwise_equal, buffers_bitwise_equal: Against the plain step from the same
            random state.
        differing: Names of what differed.
        predicted_peak_bytes, measured_peak_bytes: Absolute allocated bytes under the plan; on an accelerator as its
            statistics count them, from an allocator that has nothing cached.
        plain_peak_bytes: Measured, absolute. What is measured is None where the device keeps no statistics.
        overhead: Measured step time under the plan / plain step time - 1; NaN when not timed.
        predicted_overhead: By the plan.
        proven_ops, dropped_ops: Ops that gave the same bits when they ran twice, of those with a recipe.
        mismatched_ops, unplanned_ops: What the tape met that the plan did not say; saved.
        in_force: Whether the last real step ran under the plan; None: no step has run, or nobody watches. Where it did
            not, equal bits say nothing of the training.
        why_not_in_force: The reason, where it is known.
        note: What was done differently from the step that was asked for, "" if nothing.
    """

    loss_bitwise_equal: bool
    gradients_bitwise_equal: bool
    buffers_bitwise_equal: bool
    differing: tuple[str, ...]
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    plain_peak_bytes: int | None
    overhead: float
    predicted_overhead: float
    proven_ops: int
    dropped_ops: int
    mismatched_ops: int
    unplanned_ops: int
    in_force: bool | None = None
    why_not_in_force: str = ""
    note: str = ""

    @property
    def equal(self) -> bool:
        """The planned step gave the plain step's bits."""
        return self.loss_bitwise_equal and self.gradients_bitwise_equal and self.buffers_bitwise_equal

    def __str__(self) -> str:
        equal = "bitwise equal" if self.equal else f"DIFFERENT ({', '.join(self.differing[:3])})"
        peak = "not measured" if self.measured_peak_bytes is None else format_bytes(self.measured_peak_bytes)
        found = (
            f"Loss, gradients and buffers {equal} in a rehearsal; peak {peak}, "
            f"predicted {format_bytes(self.predicted_peak_bytes)}."
        )
        return " ".join(filter(None, [f"{self.not_in_force}." if self.not_in_force else "", found, self.note]))

    @property
    def not_in_force(self) -> str:
        """A sentence for the user if the last real step did not run under the plan; else ""."""
        why = f": {self.why_not_in_force}" if self.why_not_in_force else ""
        return f"NOT IN FORCE in the last step of training{why}" if self.in_force is False else ""


@names_checked
def verify(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    *,
    step: Step | None = None,
    rounds: int = 3,
    offload: Offload | None = None,
) -> Verification:
    """Run the plain and the planned step from the same state and compare them bit by bit.

    Args:
        batch: As for ``trace``. Where the plain step would not fit in memory, a batch cut down until it does is
            compared, under a plan of the same fraction made for it, and ``note`` says so.
        step: As for ``trace``; the step the plan was made with.
        rounds: Interleaved timings of both steps, medians compared; 0 times nothing.
        offload: As for ``apply``.

    Raises:
        PlanMismatchError: the plan is for another model. StepError: the step fails on the batch.
        TierError: see ``apply``. RehearsalMemoryError: memory runs out on a single row, or of a sharded model.
    """
    return verify_in(partial(open_tiers, policy=offload_policy(offload)), model, batch, plan, step=step, rounds=rounds)


def verify_in(
    opened: Callable[[Plan], Tiers], model: nn.Module, batch: Any, plan: Plan, *, step: Step | None = None,
    rounds: int = 3,
) -> Verification:  # fmt: skip
    """``verify`` with tiers that may be open already."""
    model, batch = unwrapped(model), without_history(batch)
    with suspended(model):
        attach.check_plan_fits(model, plan)
        # The ranks of a sharded model run the same steps, or wait for ever.
        most_rows = rows_that_fit = rows(batch)
        if not wrapped_parameters(model):
            rows_that_fit = _rows_that_fit(batch, plan, device_of(model))
        while True:
            try:
                return _verified(opened, model, batch, plan, step, rounds, rows_that_fit)
            except Exception as error:
                if not (is_out_of_memory(error) or isinstance(error, RehearsalMemoryError)):  # of measure
                    raise
                said = str(error).splitlines()[0]
                let_go_of_frames(error)
            gc.collect()
            release_cached_memory()
            if rows_that_fit <= 1 or wrapped_parameters(model):
                raise RehearsalMemoryError(
                    f"memory ran out while the plain and the planned step were compared on {rows_that_fit} of "
                    f"{most_rows} rows: {said}\nMake room on the device, or verify on a smaller batch."
                )
            rows_that_fit //= 2


def _verified(
    opened: Callable[[Plan], Tiers], model: nn.Module, batch: Any, plan: Plan, step: Step | None, rounds: int,
    compared_rows: int,
) -> Verification:  # fmt: skip
    """``verify_in`` on the first rows of ``batch``."""
    notes = []
    have = rows(batch)
    if compared_rows < have:
        batch, plan, within = _cut_down(model, batch, plan, step, compared_rows)
        notes.append(f"the plain step does not fit: compared on {compared_rows} of {have} rows, {within}")
    if not can_measure_peaks(device_of(model)):
        notes.append(f"the allocator of {device_of(model).type} keeps no statistics: peaks were not measured")
    steps = SideBySide(model, batch, step, plan, opened(plan))
    plain, planned = Way(PLAIN), Way("planned", plan)
    before = versions(model, batch)
    reference, _ = steps.outcome(plain)
    found, counts = steps.outcome(planned)
    unwritten = {key for key, version in versions(model, batch).items() if before.get(key) == version}
    others = differing(reference, found)
    del reference, found
    measured_bytes = plain_bytes = None
    if can_measure_peaks(device_of(model)):
        measured_bytes, plain_bytes = (steps.peak_bytes(way, unwritten) for way in (planned, plain))
    overhead = float("nan")
    if rounds:
        times = steps.times((plain, planned), rounds)
        overhead = times[planned.name].median_ms / times[PLAIN].median_ms - 1
    dropped = [op for op in program_of(plan).ops if op.drops]
    return Verification(
        loss_bitwise_equal="loss" not in others,
        gradients_bitwise_equal=not any(n.startswith("gradient of") for n in others),
        buffers_bitwise_equal=not any(n.startswith("buffer") for n in others),
        differing=tuple(others),
        predicted_peak_bytes=plan.measurable_peak_bytes,
        measured_peak_bytes=measured_bytes,
        plain_peak_bytes=plain_bytes,
        overhead=overhead,
        predicted_overhead=plan.predicted_overhead,
        proven_ops=sum(s.proven for s in dropped),
        dropped_ops=len(dropped),
        mismatched_ops=counts.mismatched,
        unplanned_ops=counts.unplanned,
        note="; ".join(notes),
    )


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Inside, a fitted model is as it was before ``fit``."""
    if not isinstance(model, nn.Module) or not getattr(model._compiled_call_impl, "lowtide", False):
        yield
        return
    calls = [(m, m._compiled_call_impl) for m in model.modules() if module_calls.is_lowtide_call(m._compiled_call_impl)]
    own_call = model._compiled_call_impl
    for module, call in calls:
        module._compiled_call_impl = getattr(call, "before", None)
    try:
        with getattr(own_call, "paused", nullcontext)():
            yield
    finally:
        for module, call in calls:
            module._compiled_call_impl = call


def _rows_that_fit(batch: Any, plan: Plan, device: torch.device) -> int:
    """So many rows of ``batch``, halved until its plain step fits."""
    have = left = rows(batch)
    need = plan.plain_peak_bytes - plan.before_bytes
    while left > 1 and is_short_of(need * left / have, device):
        left //= 2
    return left


def _cut_down(model: nn.Module, batch: Any, plan: Plan, step: Step | None, count: int) -> tuple[Any, Plan, str]:
    """The batch's first rows, a plan for them at the same fraction if there is one, and of what budget it is."""
    cut = first_rows(batch, count)
    graph = record(model, cut, step, None)
    costs = measure(graph)
    try:
        small = solve(graph, costs, budget=f"{min(100 * plan.predicted_fraction, 100):.4f}%")
    except BudgetInfeasibleError as error:  # few rows leave less to drop beside the gradients of the weights
        return cut, solve(graph, costs, budget=error.least_bytes), "at the least that they need"
    return cut, small, "at the same fraction"
