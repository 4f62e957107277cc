"""The steps of a compiled model as they go by: whether each ran under a plan, and its peak by the allocator's count.

Generated code says what is asked for, and the allocator may count more: a block of a segment that does not grow is
handed out whole where little would be left of it, a misaligned input is copied, and something may live that did not
when the step was watched, such as an optimizer's state. So a plan whose step takes more than its budget is found here.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from lowtide.compiled.captured_layer import device_of
from lowtide.compiled.compiled_plan import CompiledPlan
from lowtide.compiled.input_shapes import InputShapes
from lowtide.device.memory import allocated_bytes
from lowtide.device.names import is_accelerator
from lowtide.step.batches import Call
from lowtide.training.budget import StepBudget
from lowtide.training.notices import Notices
from lowtide.training.status import Counters
from lowtide.training.step_peak import StepPeak


class CountedStep(NamedTuple):
    """The last two steps that ran under ``plan``: the lower peak in absolute bytes.

    One alone may err high by chance: a collective's thread frees its buffers when it comes to it.
    """

    shapes: InputShapes
    plan: CompiledPlan
    peak_bytes: int


class CountedSteps:
    """An observer of backwards. The first that reaches the model's outputs ends the step.

    Attributes:
        counters: What went by.
    """

    def __init__(self, memory: StepBudget, notices: Notices) -> None:
        self.counters = Counters()
        self._memory, self._peak = memory, StepPeak(notices)
        self._counted: list[CompiledPlan] = []  # plans of which a step was counted
        self._open: tuple[InputShapes, CompiledPlan | None] | None = None
        self._budget_bytes: int | None = None  # of the present step
        self._why_not_planned, self._is_reached = "", False
        self._last: dict[InputShapes, CountedStep] = {}  # by input shapes
        self._found: CountedStep | None = None

    def begin(
        self, model: nn.Module, call: Call, shapes: InputShapes, plan: CompiledPlan | None, *, budget_bytes: int | None,
        why_not: str,
    ) -> None:  # fmt: skip
        """A call with gradients begins, under ``plan``; None: ``why_not`` says why.

        Args:
            budget_bytes: Of a step without a plan, where that is known.
        """
        self.stop()
        self.counters.calls += 1
        self._open, self._why_not_planned, self._is_reached = (shapes, plan), why_not, False
        self._budget_bytes = budget_bytes if plan is None else plan.budget_bytes
        device = device_of([*model.parameters(), *model.buffers()])
        if is_accelerator(device):
            there = allocated_bytes(device) or 0
        else:
            self._memory.device = device
            there = self._memory.quick_resident_bytes(model)[0]
            there += self._memory.batch_bytes_beside((call.args, call.kwargs))
        self._peak.begin(device, there, afresh=plan is not None and not any(plan is one for one in self._counted))

    def reach(self) -> None:
        """A backward has come to the outputs of the last call."""
        self._is_reached = True

    def leave_plan(self, why: str) -> None:
        """The step that runs is not the one of its plan."""
        if self._open is not None:
            self._open, self._why_not_planned = (self._open[0], None), why

    def before_backward(self, roots: Iterable[Any], *, creates: bool) -> None:
        """Nothing."""

    def after_backward(
        self, roots: Iterable[Any], error: BaseException | None, *, retains: bool, creates: bool
    ) -> None:
        """The step has ended, if this backward was its own."""
        if self._open is None or error is not None or not self._is_reached:
            return
        (shapes, plan), self._open = self._open, None
        counters, peak = self.counters, self._peak.end()
        counters.steps += 1
        counters.why_not_planned = self._why_not_planned
        counters.planned_steps += plan is not None
        counters.planned_calls += plan is not None
        counters.last_peak_bytes = peak
        if peak is None:
            counters.uncounted_steps += 1
            return
        counters.observed_peak_bytes = max(counters.observed_peak_bytes or 0, peak)
        if plan is not None:
            before, self._last[shapes] = self._last.get(shapes), CountedStep(shapes, plan, peak)
            if before is not None and before.plan is plan:
                self._found = CountedStep(shapes, plan, min(before.peak_bytes, peak))
            if not any(plan is one for one in self._counted):
                self._counted.append(plan)
        if self._budget_bytes is not None and peak > self._budget_bytes:
            counters.over_budget_steps += 1
            counters.excess_bytes = max(counters.excess_bytes, peak - self._budget_bytes)

    def take(self) -> CountedStep | None:
        """The last two steps that were counted under one plan, once."""
        found, self._found = self._found, None
        return found

    def stop(self) -> None:
        """Leave a step that has no backward."""
        if self._open is not None:
            self._open = None
            self._peak.end()
