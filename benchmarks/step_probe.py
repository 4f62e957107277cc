"""What each step of a training loop took: seconds, the allocator's peak, and whether it ran under a plan."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.measurement.allocator import measuring
from lowtide.planning.plan_request import Answer, PlanRequest
from lowtide.recording.step_recording import StepRecording
from lowtide.step.operators import allocated_bytes, storage_of, tensors_in
from lowtide.step.subclasses import plain_tensors
from lowtide.training.fitted_model import Fit

PHASES = ("first", "planning", "online", "planned")


@dataclass(frozen=True)
class StepRecord:
    """One forward pass, or several, with the backward that follows.

    Attributes:
        size: Of its batch, in the case's own unit.
        wall_s, cpu_s: Elapsed, and of the training thread alone.
        phase: ``plain``; or ``planned``: it ran under a plan; without a plan ``first``: the first step of all,
            ``planning``: the planner was at work meanwhile, ``online``: it was not.
        plan_overhead: What its plan predicts for the step that it was made for; 0.0 without a plan.
        peak_bytes: The allocator's peak, with what was resident at the start; None where it was not measured.
        resident_bytes: Of that, parameters, buffers, gradients that were there, the optimizer's state and the batch.
    """

    size: int
    wall_s: float
    cpu_s: float
    phase: str
    plan_overhead: float
    peak_bytes: int | None
    resident_bytes: int


class Stopwatch:
    """Seconds inside the functions that it is around; of those that call each other the outermost counts."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0
        self._depth = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.wall_s += time.perf_counter() - wall_s
                    self.cpu_s += time.thread_time() - cpu_s

        return timed


class Probe:
    """Watches the steps of one run.

    Args:
        fit: Of the model, if there is one.
        peaks: Measure the allocator's peak of each step. Slows the steps down: do not compare their times.
        waits_after: After so many steps, wait for the plan. None: never.

    Attributes:
        planning: On the training thread, all that planning takes there.
        letters: On the thread that talks to the planner's process: JSON. It holds the interpreter meanwhile.
        state_bytes: Of the optimizers that have stepped.
        bucket_bytes: Of what the reducer of data parallelism keeps; the loop says so.
        beside_bytes: Of both, the most that a step began with.
    """

    def __init__(
        self, model: nn.Module, fit: Fit | None = None, *, peaks: bool = False, waits_after: int | None = None
    ) -> None:
        self.model, self.fit, self.peaks, self.waits_after = model, fit, peaks, waits_after
        self.records: list[StepRecord] = []
        self.planning, self.letters = Stopwatch(), Stopwatch()
        self.state_bytes = self.bucket_bytes = self.beside_bytes = 0
        self._overhead = 0.0

    @contextmanager
    def step(self, batch: Any, size: int) -> Iterator[None]:
        """Around forward and backward of one step on ``batch``."""
        beside = self.state_bytes + self.bucket_bytes
        self.beside_bytes = max(self.beside_bytes, beside)
        resident = resident_bytes(self.model, batch) + beside
        if self.peaks:
            gc.collect()  # else garbage that the step frees would count as freed by it
        busy, planned = self._planner_is_busy, self._planned_steps
        self._overhead = 0.0
        with measuring("cpu") if self.peaks else nullcontext() as counter:
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            yield
            wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
        phase = self._phase(busy or self._planner_is_busy, self._planned_steps > planned)
        peak = resident + counter.peak if counter is not None else None
        overhead = self._overhead if phase == "planned" else 0.0
        self.records.append(StepRecord(size, wall_s, cpu_s, phase, overhead, peak, resident))
        if self.fit is not None and len(self.records) == self.waits_after:
            self.fit.wait(300)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, what planning takes is timed, and which plan a step runs under is seen."""
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_post_hook(self._note_state).remove)
            if self.fit is not None:
                plans_by_shape, planner = self.fit._lifecycle.plans_by_shape, self.fit._planner
                for owner, name, timed in (
                    (plans_by_shape, "plan_for", self._noting(self.planning.around(plans_by_shape.plan_for))),
                    (plans_by_shape, "request", self.planning.around(plans_by_shape.request)),
                    (planner, "submit", self.planning.around(planner.submit)),
                    (StepRecording, "graph_and_costs", self.planning.around(StepRecording.graph_and_costs)),
                    (PlanRequest, "to_json", self.letters.around(PlanRequest.to_json)),
                    (Answer, "from_json", self.letters.around(Answer.from_json)),
                ):
                    stack.enter_context(mock.patch.object(owner, name, timed))
            yield

    def _note_state(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.state_bytes = sum(t.nbytes for state in optimizer.state.values() for t in tensors_in(state))

    def _noting(self, plan_for: Callable[..., Any]) -> Callable[..., Any]:
        def noted(shape: Any) -> Any:
            found = plan_for(shape)
            self._overhead = 0.0 if found is None else found.plan.predicted_overhead
            return found

        return noted

    def _phase(self, planner_was_busy: bool, was_planned: bool) -> str:
        if self.fit is None:
            return "plain"
        if was_planned:
            return "planned"
        if not self.records:
            return "first"
        return "planning" if planner_was_busy else "online"

    @property
    def _planner_is_busy(self) -> bool:
        return self.fit is not None and self.fit._lifecycle.plans_by_shape._queue.asked is not None

    @property
    def _planned_steps(self) -> int:
        return 0 if self.fit is None else self.fit._lifecycle.counters.planned_steps


def resident_bytes(model: nn.Module, batch: Any = (), *, gradients_to_come: bool = False) -> int:
    """Bytes of parameters, buffers, gradients and ``batch``, each storage once; of a sharded model this rank's.

    Args:
        gradients_to_come: Count a gradient for each parameter that will get one, as a plan does.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    tensors = plain_tensors(*model.parameters(), *model.buffers(), *gradients, *tensors_in(batch))
    storages = {s._cdata: s for t in tensors if (s := storage_of(t)) is not None}
    missing = [p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None] if gradients_to_come else []
    return sum(map(allocated_bytes, storages.values())) + sum(missing)
