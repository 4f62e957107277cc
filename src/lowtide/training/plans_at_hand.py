"""The plans of one model that may run a step, in the order in which they last did; and those put aside for later."""

from collections.abc import Callable

from lowtide.shapes.call_shapes import CallShape
from lowtide.training.plan_queue import Shapes
from lowtide.training.planned_step import PlannedStep


class PlansAtHand:
    """At most one for the same shapes.

    Attributes:
        plans: The one used last at the end.
    """

    def __init__(self) -> None:
        self.plans: list[PlannedStep] = []
        self._aside: dict[Shapes, PlannedStep] = {}  # see ``best_that_fits``
        self._expects_other: set[Shapes] = set()

    def of_shape(self, shape: CallShape) -> PlannedStep | None:
        """That for steps which begin with a call of exactly this shape."""
        return next((p for p in self.plans if p.shapes[0] == shape), None)

    def covering(self, shape: CallShape) -> PlannedStep | None:
        """Of those whose shape covers it the one that recomputes least."""
        # What travels to other tiers has to be of the planned size.
        covering = [p for p in self.plans if not p.plan.tiers and p.shapes[0].covers(shape)]
        return min(covering, key=lambda p: (p.plan.predicted_overhead, p.shapes[0].sizes), default=None)

    def use(self, planned: PlannedStep, shape: CallShape) -> None:
        """A step that begins with a call of ``shape`` runs under ``planned``."""
        planned.last_served = shape
        self.plans.remove(planned)
        self.plans.append(planned)

    def put(self, planned: PlannedStep) -> None:
        """In place of one for the same shapes."""
        for replaced in [p for p in self.plans if p.shapes == planned.shapes]:
            if replaced.graph is planned.graph:
                program = replaced.tape.program
                planned.tape.program.note_proven(program.flags, program.proven_ops)
            self.plans.remove(replaced)
            if planned.shapes in self._expects_other:
                self._aside[planned.shapes] = replaced
        self._expects_other.discard(planned.shapes)
        self.plans.append(planned)

    def put_aside(self, planned: PlannedStep) -> None:
        """It does not fit beside what is there now, which may have come for a moment."""
        self.plans.remove(planned)
        self._aside[planned.shapes] = planned

    def best_that_fits(
        self, shape: CallShape, planned: PlannedStep | None, fits: Callable[[PlannedStep], bool]
    ) -> PlannedStep | None:
        """``planned``, or the one that was put aside for a step of ``shape``: of those that fit, what costs least.

        One of the two was made for more beside the step than the other, so they change places as often as that comes
        and goes, and nothing is planned or watched for it.

        Args:
            planned: The best of ``plans``.
            fits: Whether a plan fits beside what is there now.
        """
        other = next((p for p in self._aside.values() if p.shapes[0] == shape), None)
        if other is None or (planned is not None and planned.shapes != other.shapes) or not fits(other):
            return planned
        if planned is not None:
            if other.plan.predicted_overhead >= planned.plan.predicted_overhead and fits(planned):
                return planned
            self.plans.remove(planned)
            self._aside[other.shapes] = planned
        else:  # the one that was asked for in its place comes yet, and goes aside
            del self._aside[other.shapes]
            self._expects_other.add(other.shapes)
        other.last_served = shape
        self.plans.append(other)
        return other

    def let_go(self, planned: PlannedStep) -> None:
        """It is used no more."""
        self._aside.pop(planned.shapes, None)
        self.plans.remove(planned)

    def let_go_where(self, is_void: Callable[[PlannedStep], bool]) -> None:
        """These are used no more; nor is what was put aside, of any shapes."""
        self._aside.clear()
        self.plans = [p for p in self.plans if not is_void(p)]
