"""What the planner is asked for: one request at a time, since it has one core; the others wait."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from lowtide.graph.step_graph import StepGraph
from lowtide.planning.plan_request import PlanRequest
from lowtide.planning.planner_process import PendingPlan, PlannerProcess
from lowtide.shapes.call_shapes import CallShape
from lowtide.training.planned_step import PlannedStep

Shapes = tuple[CallShape, ...]  # of each call of a step
IsGone = Callable[[str, int | None], bool]  # steps of this pattern and kind do not come any more


@dataclass
class Asked:
    """A request that the planner works on.

    Attributes:
        kind: Of the steps that it is for; see ``RunningStep.kind``.
        had_first: It was put behind others when its first answer was in force.
        first: Put in force until the final plan is there.
        num_seen: So many answers have been looked at.
    """

    shapes: Shapes
    request: PlanRequest
    pending: PendingPlan
    kind: int | None = None
    had_first: bool = False
    first: PlannedStep | None = None
    num_seen: int = 0


class _Waiting(NamedTuple):
    """A request that waits; see ``Asked``."""

    shapes: Shapes
    request: PlanRequest
    kind: int | None = None
    had_first: bool = False


class PlanQueue:
    """One model's requests.

    A request of a kind of steps that do not come any more is put behind the others, whatever the planner has done for
    it: a program's first step often runs other ops than all that follow (scripted code is optimized after it).

    Attributes:
        asked: What the planner works on; None: nothing.
    """

    def __init__(self, planner: PlannerProcess, is_gone: IsGone = lambda pattern, kind: False) -> None:
        self._planner, self._kind_is_gone = planner, is_gone
        self.asked: Asked | None = None
        self._waiting: list[_Waiting] = []

    @property
    def first_shapes(self) -> list[CallShape]:
        """Of the first calls of all steps that are to be planned, and that still come."""
        entries: list[Asked | _Waiting] = [*self._waiting, *([self.asked] if self.asked else [])]
        return [entry.shapes[0] for entry in entries if not self._is_gone(entry)]

    def _is_gone(self, entry: Asked | _Waiting) -> bool:
        return self._kind_is_gone(entry.shapes[0].pattern, entry.kind)

    def add(self, shapes: Shapes, request: PlanRequest, kind: int | None = None) -> None:
        """It waits until ``ask_next``."""
        self._waiting.append(_Waiting(shapes, request, kind))

    def ask_next(self, planned: Collection[Shapes]) -> None:
        """Those without a plan first, and of them the largest.

        What it covers asks again when its plan is there, if it still wants one of its own. A request whose first answer
        is in force is put behind those that have no plan: a better plan saves less than a first one.

        Args:
            planned: Shapes that have a plan. They stay asked for: that plan serves them, and nothing would ask again.
        """

        def is_urgent(entry: _Waiting) -> bool:
            return not (entry.had_first or entry.shapes in planned or self._is_gone(entry))

        if (asked := self.asked) is not None:
            had_first = asked.had_first or asked.first is not None
            is_void = self._is_gone(asked) and not all(map(self._is_gone, self._waiting))
            if is_void or (had_first and any(map(is_urgent, self._waiting))):
                self._waiting.append(_Waiting(asked.shapes, asked.request, asked.kind, had_first))
                self._abandon()
        if self.asked is not None or not self._waiting:
            return
        chosen = max(self._waiting, key=lambda e: (not self._is_gone(e), is_urgent(e), e.shapes[0].sizes))
        shapes, request, kind, had_first = chosen
        self._waiting = [
            entry
            for entry in self._waiting
            if entry.shapes != shapes and (entry.shapes in planned or not shapes[0].covers(entry.shapes[0]))
        ]
        self.asked = Asked(shapes, request, self._planner.submit(request), kind, had_first)

    def drop(self, is_void: Callable[[Shapes], bool]) -> None:
        """Let go of requests for these shapes."""
        self._waiting = [entry for entry in self._waiting if not is_void(entry.shapes)]
        if self.asked is not None and is_void(self.asked.shapes):
            self._abandon()

    def _abandon(self) -> None:
        """The planner is to work on something else."""
        if self.asked is not None:
            self.asked.pending.abandon()
        self.asked = None

    def change_graphs(self, changed: Callable[[str, StepGraph], StepGraph]) -> None:
        """Requests are for ``changed(pattern, graph)`` from now on, ``pattern`` of the first call of their steps."""

        def now(shapes: Shapes, request: PlanRequest) -> PlanRequest:
            graph = changed(shapes[0].pattern, request.graph)
            return request if graph is request.graph else replace(request, graph=graph)

        if (asked := self.asked) is not None and now(asked.shapes, asked.request) is not asked.request:
            self.add(asked.shapes, asked.request, asked.kind)
            self._abandon()
        self._waiting = [entry._replace(request=now(entry.shapes, entry.request)) for entry in self._waiting]

    def change_budget(self, budget_bytes: int) -> None:
        """All requests are for that from now on; what the planner works on waits again."""
        if self.asked is not None:
            self.add(self.asked.shapes, self.asked.request, self.asked.kind)
        self.asked = None
        self._waiting = [entry._replace(request=replace(entry.request, budget=budget_bytes)) for entry in self._waiting]
