"""Steps that took more than the budget: each kind is told at once, and once; then what was asked for is done.

a step is over -> its peak, as it was counted, and the budget -> a line, and
    "warn"    nothing else
    "raise"   BudgetExceededError, when its backward has ended or the next step begins
    "lower"   steps and plans aim lower by what was too much; the budget that peaks are compared with stays
"""

from lowtide.errors import BudgetExceededError
from lowtide.options import LOWER, RAISE
from lowtide.training.budget import StepBudget
from lowtide.training.notices import Notices
from lowtide.training.plans_by_shape import PlansByShape
from lowtide.training.status import Counters
from lowtide.units import format_bytes

# Of the budget: blocks that are not split differ from step to step, and no plan is made for that.
UNTOLD_SHARE = 1 / 512
OWN_BYTES = 1 << 16  # what comparisons of our own may take beside a step
# Kinds of steps.
ONLINE, WHOLE, PLANNED = "that ran online", "that was saved whole", "under its plan"


class Excess:
    """Of the steps of one model.

    Attributes:
        error: To be raised, once, where the training loop can see it; None: nothing is.
    """

    def __init__(
        self, on_excess: str, budget: StepBudget, plans_by_shape: PlansByShape, counters: Counters, reasons: Notices
    ) -> None:
        self._on_excess, self._budget, self._plans_by_shape = on_excess, budget, plans_by_shape
        self._counters, self._reasons = counters, reasons
        self._told_bytes: dict[str, int] = {}  # by kind: the most that was too much
        self._lowered_at: dict[str, int] = {}  # by kind: the peak for which the aim was lowered last
        self.error: BudgetExceededError | None = None

    def note(self, kind: str, peak: int, why: str, *, predicted_bytes: int | None = None, acts: bool) -> None:
        """A step is over.

        Args:
            peak: As the allocator counted it, or an online tape where nobody did.
            why: The first cause, as far as it is known.
            predicted_bytes: Of its plan.
            acts: It was a step of this model alone, to its end, with a budget.
        """
        judged = self._budget.judged_bytes
        over = peak - judged
        if over <= max(UNTOLD_SHARE * judged, OWN_BYTES):
            return
        took = f"{format_bytes(peak)} of {format_bytes(judged)}"
        if predicted_bytes is None:
            line = f"a step {kind} took up to {format_bytes(over)} more than {self._budget.told} ({took}): {why}"
        else:
            line = f"a step {kind} took up to {took}, predicted {format_bytes(predicted_bytes)}: {why}"
        is_foreseen = predicted_bytes is not None and peak <= predicted_bytes + OWN_BYTES  # the plan's line has said it
        if not is_foreseen and over > self._told_bytes.get(kind, 0):
            self._told_bytes[kind] = over
            self._reasons.say_first(f"excess {kind}", line)
        if not acts:
            return
        if self._on_excess == RAISE:
            self.error = BudgetExceededError(
                f"a step {kind} took {took}, {format_bytes(over)} more than the budget: {why}.\n"
                "Its gradients are whole. Raise the budget or reduce the batch; on_excess='warn' goes on.",
                budget_bytes=judged,
                peak_bytes=peak,
            )
        elif self._on_excess == LOWER:
            self._aim_lower(kind, peak, over)

    def _aim_lower(self, kind: str, peak: int, over: int) -> None:
        """Have steps take less by ``over``, unless that did not help the last time."""
        before = self._lowered_at.get(kind)
        if before is not None and peak >= before - OWN_BYTES:
            self._reasons.say_first(
                f"aim {kind}", f"aiming lower did not help: steps {kind} take {format_bytes(peak)} all the same"
            )
            return
        aim = self._budget.limit_bytes - over
        if aim <= self._budget.resident_bytes:
            return
        self._lowered_at[kind] = peak
        self._budget.aim_lower(over)
        self._plans_by_shape.change_budget(aim)
        judged = format_bytes(self._budget.judged_bytes)
        self._reasons.say_first(
            f"aim {kind}", f"steps aim at {format_bytes(aim)} from now on, so that they stay within {judged}"
        )
