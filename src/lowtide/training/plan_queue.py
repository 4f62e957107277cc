"""What the planner is asked for: one request at a time, since it has one core; the others wait."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from lowtide.planning.plan_request import PlanRequest
from lowtide.planning.planner_process import PendingPlan, PlannerProcess
from lowtide.shapes.call_shapes import CallShape
from lowtide.training.planned_step import PlannedStep

Shapes = tuple[CallShape, ...]  # of each call of a step


@dataclass
class Asked:
    """A request that the planner works on.

    Attributes:
        first: Put in force until the final plan is there.
        num_seen: So many answers have been looked at.
    """

    shapes: Shapes
    request: PlanRequest
    pending: PendingPlan
    first: PlannedStep | None = None
    num_seen: int = 0


class PlanQueue:
    """One model's requests.

    Attributes:
        asked: What the planner works on; None: nothing.
    """

    def __init__(self, planner: PlannerProcess) -> None:
        self._planner = planner
        self.asked: Asked | None = None
        self._waiting: list[tuple[Shapes, PlanRequest]] = []

    @property
    def first_shapes(self) -> list[CallShape]:
        """Of the first calls of all steps that are to be planned."""
        return [shapes[0] for shapes, _ in self._waiting] + ([self.asked.shapes[0]] if self.asked else [])

    def add(self, shapes: Shapes, request: PlanRequest) -> None:
        """It waits until ``ask_next``."""
        self._waiting.append((shapes, request))

    def ask_next(self, planned: Collection[Shapes]) -> None:
        """The largest first. What it covers asks again when its plan is there, if it still wants one of its own.

        Args:
            planned: Shapes that have a plan. They stay asked for: that plan serves them, and nothing would ask again.
        """
        if self.asked is not None or not self._waiting:
            return
        shapes, request = max(self._waiting, key=lambda entry: entry[0][0].sizes)
        self._waiting = [
            entry
            for entry in self._waiting
            if entry[0] != shapes and (entry[0] in planned or not shapes[0].covers(entry[0][0]))
        ]
        self.asked = Asked(shapes, request, self._planner.submit(request))

    def drop(self, is_void: Callable[[Shapes], bool]) -> None:
        """Let go of requests for these shapes."""
        self._waiting = [entry for entry in self._waiting if not is_void(entry[0])]
        if self.asked is not None and is_void(self.asked.shapes):
            self.asked = None

    def change_budget(self, budget_bytes: int) -> None:
        """All requests are for that from now on; what the planner works on waits again."""
        if self.asked is not None:
            self.add(self.asked.shapes, self.asked.request)
        self.asked = None
        self._waiting = [(shapes, replace(request, budget=budget_bytes)) for shapes, request in self._waiting]
