"""``fit`` without a batch: the real steps are watched, planned beside training, and checked as they run."""

from typing import Any, Self

from torch import nn

from lowtide.errors import LowtideError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.options import FitOptions
from lowtide.plan import Plan
from lowtide.reports.terminal import fit_report
from lowtide.runtime import backward_entry
from lowtide.runtime.budget import StepBudget
from lowtide.runtime.planned_step import PlannedStep
from lowtide.runtime.planner_process import PlannerProcess
from lowtide.runtime.status import Status
from lowtide.runtime.step_watcher import StepWatcher
from lowtide.tracing import module_calls
from lowtide.tracing.tracer import check_supported


class WatchedFit:
    """A model whose steps are watched. The training loop stays as it is; ``remove`` gives the model back as it was."""

    def __init__(self, model: nn.Module, options: FitOptions) -> None:
        check_supported(model)
        self.model = model
        self._budget = StepBudget(model, options.budget, options.optimizer)
        self._planner = PlannerProcess()
        self._planner.start()
        self._watcher = StepWatcher(model, options, self._budget, self._planner)
        self._undo: list[Any] = [
            backward_entry.observe(self._watcher),
            module_calls.install(model, self._watcher),
        ]

    def wait(self, timeout_s: float | None = None) -> Self:
        """Wait until the plan for what was seen is in force.

        Raises:
            LowtideError: no step has been seen yet. TimeoutError: there is no plan after ``timeout_s``.
        """
        if not self._watcher.counters.steps:
            raise LowtideError("no step has been seen yet: nothing is being planned.\nRun a training step first.")
        self._watcher.shelf.wait(timeout_s)
        return self

    def status(self) -> Status:
        """What really ran so far."""
        counters = self._watcher.counters
        return Status(
            in_force=counters.last_step_planned,
            steps=counters.steps,
            planned_steps=counters.planned_steps,
            calls=counters.calls,
            planned_calls=counters.planned_calls,
            observed_peak_bytes=counters.observed_peak_bytes,
            budget_bytes=self._budget.absolute_bytes,
            shapes=len(self._watcher.shelf.seen),
            plans=len(self.plans),
            planning_s=self._watcher.shelf.planning_s,
            reasons=tuple(counters.reasons),
        )

    @property
    def plans(self) -> list[Plan]:
        """At most ``max_plans``, the one used last at the end."""
        return [planned.plan for planned in self._watcher.shelf.plans]

    @property
    def _latest(self) -> PlannedStep:
        planned = self._watcher.shelf.plans
        if not planned:
            raise LowtideError("there is no plan yet.\nRun a training step, then call fit.wait().")
        return planned[-1]

    @property
    def plan(self) -> Plan:
        """The one used last. Raises: LowtideError: there is none yet."""
        return self._latest.plan

    @property
    def graph(self) -> StepGraph:
        return self._latest.graph

    @property
    def costs(self) -> Costs:
        return self._latest.costs

    @property
    def warnings(self) -> list[str]:
        """What you should know, one line each."""
        return list(self._watcher.counters.reasons)

    def report(self) -> str:
        """What really ran, and what the plan used last decided and predicts; at most 100 columns."""
        status = str(self.status())
        return f"{status}\n\n{fit_report(self.plan, self.graph)}" if self.plans else status

    def remove(self) -> None:
        """Detach: the model is as it was before ``fit``. Safe to call twice, and between forward and backward."""
        while self._undo:
            self._undo.pop()()
        self._watcher.close()
        self._planner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
