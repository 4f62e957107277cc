"""What the training loop is to know once a step is over: its status for loggers, and the error that was asked for."""

from lowtide.options import FitOptions
from lowtide.training.budget import StepBudget
from lowtide.training.lifecycle import Lifecycle
from lowtide.training.notices import Notices
from lowtide.training.status import Status


def status_of(lifecycle: Lifecycle, budget: StepBudget, reasons: Notices, *, is_removed: bool = False) -> Status:
    """What really ran so far. Nobody waits for a device."""
    lifecycle.settle()
    lifecycle.look_at_seals(waits=False)
    lifecycle.recorded.request_plans()
    counters, plans_by_shape = lifecycle.counters, lifecycle.plans_by_shape
    why_not = "the fit was removed" if is_removed else counters.why_not_planned
    return Status.of(
        counters,
        why_not=why_not,
        budget_bytes=budget.told_bytes,
        shapes=len({shape.without_gradients() for shape in plans_by_shape.seen}),
        plans=len(plans_by_shape.plans),
        planning_s=plans_by_shape.planning_s,
        reasons=reasons.lines,
        opaque_calls=_opaque_calls(lifecycle),
    )


def _opaque_calls(lifecycle: Lifecycle) -> str:
    """Of the latest plan, with what has shown since that it must be saved."""
    planned = lifecycle.latest
    if planned is None:
        return ""
    return planned.plan.opaque_calls([op.number for op in planned.tape.program.ops if op.drops])


class AfterStep:
    """Speaks to the training loop where its own code goes on: a backward has ended, or the model is called again."""

    def __init__(self, options: FitOptions, lifecycle: Lifecycle, budget: StepBudget, reasons: Notices) -> None:
        self._on_status = options.on_status
        self._lifecycle, self._budget, self._reasons = lifecycle, budget, reasons
        self._told_steps = 0

    def speak(self) -> None:
        """Raises: BudgetExceededError, or what ``on_status`` raises."""
        steps, excess = self._lifecycle.counters.steps, self._lifecycle.memory.excess
        if self._on_status is not None and steps != self._told_steps:
            self._told_steps = steps
            self._on_status(status_of(self._lifecycle, self._budget, self._reasons))
        error, excess.error = excess.error, None
        if error is not None:
            raise error
