"""The plans at hand, by shape: asked for, put in force when they come back, given up when steps turn out otherwise."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import nn

from lowtide.errors import BudgetInfeasibleError, LowtideError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.options import FitOptions
from lowtide.plan import Plan
from lowtide.runtime.plan_request import PlanRequest
from lowtide.runtime.planner_process import PendingPlan, PlannerProcess
from lowtide.tape.program import TapedCall, TapedOp, program_of
from lowtide.tape.tape import Tape
from lowtide.units import format_bytes

logger = logging.getLogger("lowtide")
_MAX_REPLANS = 2  # of one shape, when its steps turn out to run other ops than the plan knows
_DRIFT = 0.02  # of the dropped tensors: so many ops that did not come as planned are worth another plan


@dataclass
class PlannedStep:
    """A plan in force, and the tape that carries it out.

    Attributes:
        keys: Shape of each call of the model in the step, in order.
    """

    plan: Plan
    graph: StepGraph
    costs: Costs
    keys: tuple[str, ...]
    tape: Tape

    @property
    def calls(self) -> list[TapedCall]:
        return self.tape.program.root.children.get("", [])


@dataclass
class Shape:
    """Steps that start with a call of one shape."""

    key: str
    replans: int = 0
    pending: PendingPlan | None = None
    request: PlanRequest | None = None
    keys: tuple[str, ...] = ()
    planned: PlannedStep | None = None
    failed: str = ""  # why there will be no plan
    mismatched: int = 0  # ops that did not come as planned, when last looked at

    def give_up_plan(self) -> bool:
        """Plan again from another watched step; False where that has not helped before."""
        if self.replans >= _MAX_REPLANS:
            return False
        self.replans += 1
        self.planned = self.pending = None
        return True

    @property
    def has_drifted(self) -> bool:
        """Many ops since the last look did not come as planned."""
        assert self.planned is not None
        tape = self.planned.tape
        new = tape.counts.mismatched - self.mismatched
        self.mismatched = tape.counts.mismatched
        return new > _DRIFT * max(1, sum(bool(op.drops) for op in tape.program.ops))


class PlanShelf:
    """One model's plans.

    Attributes:
        shapes: By shape of a step's first call of the model; the one used last at the end.
        planning_s: Seconds that the planner took in all.
    """

    def __init__(
        self, model: nn.Module, options: FitOptions, planner: PlannerProcess, say: Callable[[str], None]
    ) -> None:
        self._model, self._options, self._planner, self._say = model, options, planner, say
        self.shapes: OrderedDict[str, Shape] = OrderedDict()
        self.planning_s = 0.0

    def shape(self, key: str) -> Shape:
        """The shape of steps that start with a call of ``key``, with the plans that have come back by now."""
        self._adopt_plans()
        if key not in self.shapes:
            self.shapes[key] = Shape(key)
        self.shapes.move_to_end(key)
        self._forget_oldest()
        return self.shapes[key]

    def request(self, keys: tuple[str, ...], graph: StepGraph, costs: Costs, budget_bytes: int) -> None:
        """Have a step of calls ``keys`` planned."""
        shape = self.shape(keys[0])
        shape.keys = keys
        options = self._options
        self._ask(shape, PlanRequest(graph, costs, budget_bytes, options.method, options=options.solver))

    def refuse(self, key: str, why: str) -> None:
        """There will be no plan for steps that start with a call of ``key``: they run online."""
        self.shape(key).failed = why
        self._say(f"no plan for steps like this one, they run online: {why}")

    def wait(self, timeout_s: float | None = None) -> None:
        """Until no answer of the planner is outstanding. Raises: TimeoutError."""
        while waiting := [s.pending for s in self.shapes.values() if s.pending is not None]:
            for pending in waiting:
                with suppress(LowtideError):  # ``_adopt`` says it
                    pending.plan(timeout_s)
            self._adopt_plans()

    def _ask(self, shape: Shape, request: PlanRequest) -> None:
        shape.request, shape.pending = request, self._planner.submit(request)

    def _adopt_plans(self) -> None:
        """Put in force what has come back from the planner."""
        for shape in self.shapes.values():
            pending = shape.pending
            if pending is None:
                continue
            if pending.done():
                shape.pending = None
                self._adopt(shape, pending)
            elif pending.first_done() and shape.planned is None:
                with suppress(LowtideError):  # the final answer tells
                    self._put_in_force(shape, pending.first())

    def _adopt(self, shape: Shape, pending: PendingPlan) -> None:
        assert shape.request is not None
        self.planning_s += pending.planning_s
        if pending.reason:
            self._say(pending.reason)
        try:
            plan = pending.plan()
        except BudgetInfeasibleError as error:
            self._say(
                f"no plan fits {format_bytes(error.budget_bytes)}: running at the least there is, "
                f"{format_bytes(error.least_bytes)}"
            )
            self._ask(shape, replace(shape.request, budget=error.least_bytes))
        except LowtideError as error:
            shape.failed = str(error).splitlines()[0]
            self._say(f"no plan, steps run online: {shape.failed}")
        else:
            self._put_in_force(shape, plan)
            self._tell(plan, pending.planning_s)

    def _put_in_force(self, shape: Shape, plan: Plan) -> None:
        assert shape.request is not None
        tape = Tape(program_of(plan), self._model)
        tape.proves_at_birth = self._on_difference
        shape.planned = PlannedStep(plan, shape.request.graph, shape.request.costs, shape.keys, tape)
        shape.mismatched = 0

    def _on_difference(self, op: TapedOp) -> None:
        self._say(f"{op.name} in {op.where or 'the model'} gives other bits when it runs again: saved from now on")

    def _tell(self, plan: Plan, planning_s: float) -> None:
        logger.warning(
            "lowtide: planned in %.1f s beside training: peak %s of %s, overhead %.1f %%, plan %d of at most %d (%s)",
            planning_s,
            format_bytes(plan.predicted_peak_bytes),
            format_bytes(plan.budget_bytes or plan.predicted_peak_bytes),
            100 * plan.predicted_overhead,
            sum(s.planned is not None for s in self.shapes.values()),
            self._options.max_plans,
            plan.provenance.get("batch", "a step"),
        )

    def _forget_oldest(self) -> None:
        planned = [s for s in self.shapes.values() if s.planned is not None or s.pending is not None]
        for shape in planned[: max(0, len(planned) - self._options.max_plans)]:
            del self.shapes[shape.key]
