"""What is told of a model's plans: each that is made, and that some are above the budget."""

import logging
import re
from collections.abc import Collection

from lowtide.plan import Plan
from lowtide.shapes.call_shapes import CallShape
from lowtide.training.notices import Notices
from lowtide.units import format_bytes

logger = logging.getLogger("lowtide")
_MOST_TOLD = 3  # plans, one line each: batches of many sizes have many


class ToldPlans:
    """Of one model.

    Attributes:
        seen: Shapes of the first calls of steps.
        least_bytes: By shape, the least budget there is, where the planner was asked for less.
    """

    def __init__(self, most_plans: int, reasons: Notices) -> None:
        self._most_plans, self._reasons = most_plans, reasons
        self.seen: set[CallShape] = set()
        self.least_bytes: dict[CallShape, int] = {}
        self._told_least = ""  # the line that plans are above the budget
        self._refused: dict[str, set[CallShape]] = {}  # by cause, without its numbers
        self._num_told = 0  # plans

    def tell(self, plan: Plan, number: int, made: str) -> None:
        """Log the first few plans of a training; the others too, for those who listen to what is less urgent.

        Args:
            number: Of the plan, among those at hand.
            made: How it came.
        """
        self._num_told += 1
        logger.log(
            logging.WARNING if self._num_told <= _MOST_TOLD else logging.INFO,
            "lowtide: %s: peak %s of %s, overhead %.1f %%, plan %d of at most %d (%s)",
            made,
            format_bytes(plan.budgeted_peak_bytes),
            format_bytes(plan.budget_bytes or plan.predicted_peak_bytes),
            100 * plan.predicted_overhead,
            number,
            self._most_plans,
            plan.provenance.get("batch", "a step"),
        )

    def say_least(self, budget_bytes: int, refused: Collection[CallShape]) -> None:
        """That plans are above the budget: one line for all shapes, told once, and taken back where it is not so.

        Args:
            refused: Shapes that get no plan.
        """
        above = {s: least for s, least in self.least_bytes.items() if least > budget_bytes and s not in refused}
        budget, before = format_bytes(budget_bytes), self._told_least
        self._told_least = ""
        if above:
            which = self.which(above)
            most = f"{'up to ' if len(above) > 1 else ''}{format_bytes(max(above.values()))}"
            self._told_least = f"no plan fits {budget}{which}: running at the least there is, {most}"
            self._reasons.say_first(f"least above {budget}", self._told_least)
        if before != self._told_least:
            self._reasons.withdraw(before)

    def say_refused(self, shape: CallShape, why: str, refused: Collection[CallShape]) -> None:
        """That steps which begin with a call of ``shape`` get no plan. One line for all shapes of one cause, logged for
        the first of them; numbers in it are those of the last.

        Args:
            refused: All shapes that get no plan.
        """
        cause = re.sub(r"[\d.,]+", "", why)
        shapes = self._refused[cause] = {shape, *self._refused.get(cause, set()).intersection(refused)}
        which = self.which(shapes) or " for steps like this one"
        self._reasons.say_first(f"refused, {cause}", f"no plan{which}, {why}")

    def which(self, shapes: Collection[CallShape]) -> str:
        """Which of the steps so far begin with calls of ``shapes``, in words; "" where all do."""
        others = self.seen.difference(shapes)
        adding = {s.has_gradients for s in shapes}
        is_kind = len(adding) == 1 and any(s.has_gradients not in adding for s in others)
        kind = f" for steps that {'add to' if True in adding else 'make their'} gradients" if is_kind else ""
        few, all_ = ({s.without_gradients() for s in several} for several in (shapes, {*shapes, *self.seen}))
        if len(all_) == 1:
            return kind
        count = "one of " * (len(few) == 1) + str(len(all_) if len(few) == 1 else len(few))
        what = "input shapes" if len({s.pattern for s in all_}) == 1 else "kinds of steps"
        return f"{kind} of {count} {what}" if kind else f" for {count} {what}"

    def say_dynamic(self, plan: Plan) -> None:
        """That sizes in the step depend on data, if so; of what follows from them too."""
        if (op := next((op for op in plan.ops if op.dynamic), None)) is None:
            return
        where = plan.frames[op.frame].path or ("the model" if op.frame else "the loss outside the model")
        self._reasons.say(
            f"sizes of {op.name} in {where} depend on data: a planned step in which they are larger than in the "
            "planned one leaves its plan where a module call shows that, and takes more than the budget elsewhere"
        )
