"""The plans at hand, by shape: asked for, put in force when they come back, given up when steps turn out otherwise.

A plan serves every shape that its own shape covers (``plan_transfer.py`` says why the budget holds). So the largest
shape so far is planned first. While there is room for more plans, shapes much smaller than what serves them get plans
of their own: a short batch should recompute little, and one that fits plain nothing.
"""

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import nn

from lowtide.errors import BudgetInfeasibleError, LowtideError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.options import FitOptions
from lowtide.plan import Plan
from lowtide.runtime.call_shapes import CallShape
from lowtide.runtime.plan_cache import PlanCache
from lowtide.runtime.plan_request import PlanRequest
from lowtide.runtime.planned_step import PlannedStep
from lowtide.runtime.planner_process import PendingPlan, PlannerProcess
from lowtide.tape.program import TapedOp, program_of
from lowtide.tape.tape import Tape
from lowtide.units import format_bytes

logger = logging.getLogger("lowtide")
_MAX_REPLANS = 2  # of one shape, when its steps turn out to run other ops than the plan knows
_STEPS_REMEMBERED = 8  # of one pattern: where most of them ran other ops than planned, no plan fits
_MUCH_SMALLER = 0.85  # of the shape whose plan serves it: worth a plan of its own


@dataclass
class _Asked:
    """A request that the planner works on."""

    shapes: tuple[CallShape, ...]
    request: PlanRequest
    pending: PendingPlan
    first: PlannedStep | None = None  # put in force until the final plan is there


class PlanShelf:
    """One model's plans.

    Attributes:
        plans: The one used last at the end.
        seen: Shapes of the first calls of steps.
        planning_s: Seconds that the planner took in all.
    """

    def __init__(
        self, model: nn.Module, options: FitOptions, planner: PlannerProcess, say: Callable[[str], None]
    ) -> None:
        self._model, self._options, self._planner, self._say = model, options, planner, say
        self.plans: list[PlannedStep] = []
        self.seen: set[CallShape] = set()
        self.planning_s = 0.0
        self._asked: _Asked | None = None  # one at a time: the planner has one core
        self._next: list[tuple[tuple[CallShape, ...], PlanRequest]] = []  # wait for it
        # Of the last planned steps of each pattern: did they run other ops?
        self._diverged: dict[str, deque[bool]] = defaultdict(lambda: deque(maxlen=_STEPS_REMEMBERED))
        self._unsteady: set[str] = set()  # patterns whose steps run other ops each time
        self._alone: set[CallShape] = set()  # run other ops than the plans that cover them
        self._refused: set[CallShape] = set()
        self._num_nodes: dict[tuple[CallShape, ...], Mapping[int, int]] = {}  # of watched steps
        self._replans: Counter[CallShape] = Counter()

    # -- which plan -----------------------------------------------------------------------------------------

    def plan_for(self, shape: CallShape) -> PlannedStep | None:
        """The plan for a step that starts with a call of ``shape``; None: there is none, or it wants another watch."""
        self._adopt_plans()
        self.seen.add(shape)
        found = self._serving(shape)
        if found is not None and found.diverged and not self._keep_diverged(found):
            found = self._serving(shape)
        if found is None or (found.shapes[0] != shape and self._wants_own_plan(shape, found)):
            return None
        found.last_served = shape
        self.plans.remove(found)
        self.plans.append(found)
        return found

    def wants_graph(self, shape: CallShape) -> bool:
        """Whether a watched step of ``shape`` should be recorded."""
        if shape in self._refused or shape.pattern in self._unsteady:
            return False
        waiting = [shapes[0] for shapes, _ in self._next] + ([self._asked.shapes[0]] if self._asked else [])
        return not any(s == shape if shape in self._alone else s.covers(shape) for s in waiting)

    def _serving(self, shape: CallShape) -> PlannedStep | None:
        """The plan of ``shape``, or of the smallest shape that covers it."""
        if shape.pattern in self._unsteady:
            return None
        exact = next((p for p in self.plans if p.shapes[0] == shape), None)
        if exact is not None or shape in self._alone:
            return exact
        covering = [p for p in self.plans if p.shapes[0].covers(shape)]
        return min(covering, key=lambda p: p.shapes[0].sizes, default=None)

    def _wants_own_plan(self, shape: CallShape, served_by: PlannedStep) -> bool:
        """While the planner is idle and there is room: a shape that recomputes more than it would have to."""
        if served_by.tape.program.keeps_everything or shape in self._refused or self._asked is not None:
            return False
        return len(self.plans) < self._options.max_plans and shape.share_of(served_by.shapes[0]) <= _MUCH_SMALLER

    def note_step(self, planned: PlannedStep, *, diverged: bool) -> None:
        """A step has ended that began under ``planned``; ``diverged``: it ran other ops."""
        planned.diverged = diverged
        self._diverged[planned.shapes[0].pattern].append(diverged)

    def _keep_diverged(self, planned: PlannedStep) -> bool:
        """The last step under ``planned`` ran other ops: whether it is still the best there is."""
        planned.diverged = False
        shape, own = planned.last_served, planned.shapes[0]
        steps = self._diverged[own.pattern]
        out_of_replans = self._replans[own] >= _MAX_REPLANS
        if (out_of_replans or len(steps) == _STEPS_REMEMBERED) and 2 * sum(steps) > len(steps):
            self._run_online(own.pattern)
            return False
        if shape is not None and shape != own:
            self._alone.add(shape)
            return False
        if out_of_replans:
            return True
        self._replans[own] += 1
        self.plans.remove(planned)
        return False

    def _run_online(self, pattern: str) -> None:
        """Steps that start with calls of ``pattern`` have no plan from now on."""
        steps = self._diverged[pattern]
        self._unsteady.add(pattern)
        self.plans = [p for p in self.plans if p.shapes[0].pattern != pattern]
        self._say(
            f"{sum(steps)} of the last {len(steps)} steps under a plan ran other ops than planned (skipped layers, "
            "experts or branches that depend on data), so steps like these run online from now on: within the budget, "
            "and slower than under a plan. For a plan, let every step run the same ops"
        )

    def keep_within(self, budget_bytes: int) -> None:
        """Let go of plans and requests for more than ``budget_bytes``."""
        self.plans = [p for p in self.plans if p.plan.predicted_peak_bytes <= budget_bytes]
        self._next = [(shapes, replace(request, budget=budget_bytes)) for shapes, request in self._next]
        self._asked = None
        self._ask_next()

    # -- asking ---------------------------------------------------------------------------------------------

    def request(
        self,
        shapes: tuple[CallShape, ...],
        graph: StepGraph,
        costs: Costs,
        budget_bytes: int,
        num_nodes: Mapping[int, int],
    ) -> None:
        """Have a step planned whose calls have these shapes, and made so many autograd nodes each."""
        self._num_nodes[shapes] = num_nodes
        options = self._options
        request = PlanRequest(
            graph, costs, budget_bytes, options.method, options=options.solver, cache_dir=PlanCache().directory
        )
        self._next.append((shapes, request))
        self._ask_next()

    def refuse(self, shape: CallShape, why: str) -> None:
        """There will be no plan for steps that start with a call of ``shape``: they run online."""
        self._refused.add(shape)
        self._say(f"no plan for steps like this one, they run online: {why}")

    def wait(self, timeout_s: float | None = None) -> None:
        """Until no answer of the planner is outstanding. Raises: TimeoutError."""
        while self._asked is not None:
            with suppress(LowtideError):  # ``_adopt`` says it
                self._asked.pending.plan(timeout_s)
            self._adopt_plans()

    def _ask_next(self) -> None:
        """The largest first. What it covers asks again when its plan is there, if it still wants one of its own."""
        if self._asked is not None or not self._next:
            return
        shapes, request = max(self._next, key=lambda entry: entry[0][0].sizes)
        self._next = [entry for entry in self._next if entry[0][0] != shapes[0] and not shapes[0].covers(entry[0][0])]
        self._asked = _Asked(shapes, request, self._planner.submit(request))

    def _adopt_plans(self) -> None:
        """Put in force what has come back from the planner."""
        asked = self._asked
        if asked is None:
            return
        if asked.pending.done():
            self._asked = None
            self._adopt(asked)
            self._ask_next()
        elif asked.pending.first_done() and asked.first is None:
            with suppress(LowtideError):  # the final answer tells
                asked.first = self._put_in_force(asked, asked.pending.first())

    def _adopt(self, asked: _Asked) -> None:
        pending = asked.pending
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
            self._next.append((asked.shapes, replace(asked.request, budget=error.least_bytes)))
        except LowtideError as error:
            self.refuse(asked.shapes[0], str(error).splitlines()[0])
        else:
            if asked.first in self.plans:
                self.plans.remove(asked.first)
            self._put_in_force(asked, plan)
            self._tell(plan, pending)

    def _put_in_force(self, asked: _Asked, plan: Plan) -> PlannedStep:
        tape = Tape(program_of(plan), self._model)
        tape.proves_at_birth = self._on_difference
        tape.matches_all = any(self._diverged[asked.shapes[0].pattern])
        planned = PlannedStep(plan, asked.request.graph, asked.request.costs, asked.shapes, tape)
        planned.num_nodes = self._num_nodes[asked.shapes]
        self.plans.append(planned)
        if any(op.dynamic for op in plan.ops):
            self._say(
                "some sizes depend on data (tokens of an expert): a planned step in which they are larger than "
                "in the watched one takes more than the budget. Leave room for that"
            )
        del self.plans[: -self._options.max_plans]
        return planned

    def _on_difference(self, op: TapedOp) -> None:
        self._say(f"{op.name} in {op.where or 'the model'} gives other bits when it runs again: saved from now on")

    def _tell(self, plan: Plan, pending: PendingPlan) -> None:
        made = "found the plan of an earlier run" if pending.source == "cache" else "planned beside training"
        logger.warning(
            "lowtide: %s in %.1f s: peak %s of %s, overhead %.1f %%, plan %d of at most %d (%s)",
            made,
            pending.planning_s,
            format_bytes(plan.predicted_peak_bytes),
            format_bytes(plan.budget_bytes or plan.predicted_peak_bytes),
            100 * plan.predicted_overhead,
            len(self.plans),
            self._options.max_plans,
            plan.provenance.get("batch", "a step"),
        )
