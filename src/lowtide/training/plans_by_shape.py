"""The plans at hand, by shape: asked for, put in force when they come back, given up when steps turn out otherwise.

A plan serves every shape that its own shape covers: no storage of it is larger, so its peak is no higher. So the
largest shape so far is planned first. A short batch should recompute little, and one that fits plain nothing. Where a
shape's graph follows from those of watched shapes (``shape_statistics.py``), plans are made for a few buckets of
shapes, without watching them. Elsewhere a shape that is much smaller than the one whose plan serves it is watched and
gets a plan of its own.
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from lowtide.errors import BudgetInfeasibleError, LowtideError, TierError
from lowtide.graph.costs import Costs
from lowtide.graph.gradients import with_gradients_before, with_gradients_made
from lowtide.graph.memo import with_resident
from lowtide.graph.step_graph import StepGraph
from lowtide.options import FitOptions
from lowtide.plan import Plan
from lowtide.planning.plan_cache import PlanCache
from lowtide.planning.plan_request import PlanRequest
from lowtide.planning.planner_process import PlannerProcess
from lowtide.shapes.call_shapes import CallShape
from lowtide.shapes.dimensions import join
from lowtide.shapes.shape_statistics import ShapeStatistics
from lowtide.solvers.build_plan import with_decisions_of
from lowtide.solvers.dispatch import solve
from lowtide.step.gradients_there import AddingSteps
from lowtide.tape.program import program_of
from lowtide.tape.tape import Tape
from lowtide.tracing.model_facts import ModelFacts
from lowtide.training.differing_steps import MOST_REPLANS, STEPS_REMEMBERED, DifferingSteps, Verdict
from lowtide.training.known_steps import KnownStep, KnownSteps
from lowtide.training.notices import Notices
from lowtide.training.plan_queue import Asked, PlanQueue, Shapes
from lowtide.training.planned_step import PlannedStep
from lowtide.training.plans_at_hand import PlansAtHand
from lowtide.training.shared_tiers import SharedTiers
from lowtide.training.status import WATCHED
from lowtide.training.told_plans import ToldPlans
from lowtide.training.unplanned_steps import UnplannedSteps
from lowtide.units import format_bytes

_PEAK_TOLERANCE = 0.01  # of what a step may take: a plan is kept that took so much more
_MOST_EVENTS_AT_ONCE = 10_000  # of a graph that is planned while a step waits: a second or two
_MOST_IN_VAIN, _THEN_EVERY = 3, 8  # plans that served no step; of the steps after them, so many are recorded
_WORTH_OWN_PLAN = 0.005  # of the plain step's time: what a step that makes its gradients could do without
_MUCH_SMALLER = 0.85  # of the shape whose plan serves it: worth a plan of its own
_RUN_ONLINE = (
    "(skipped layers, experts or branches that depend on data), so steps like these run online from now on: within the "
    "budget, and slower than under a plan. For a plan, let every step run the same ops"
)


class _PlanWorseThanNoneError(LowtideError):
    """Steps without a plan take less, or are faster."""


class PlansByShape:
    """One model's plans.

    Attributes:
        is_sharded: Parameters are whole for moments only, or in parts.
        unplanned: What steps without a plan took.
    """

    def __init__(
        self,
        facts: ModelFacts,
        options: FitOptions,
        planner: PlannerProcess,
        tiers: SharedTiers,
        reasons: Notices,
    ) -> None:
        self._model = weakref.ref(facts.model)
        self._options, self._tiers, self._reasons = options, tiers, reasons
        self.is_sharded = facts.is_wrapped or facts.is_partitioned
        self._at_hand = PlansAtHand()
        self._told = ToldPlans(options.max_plans, reasons)
        self.unplanned = UnplannedSteps()
        self._differing = DifferingSteps()
        self._known = KnownSteps()
        self._adding = AddingSteps()
        self._statistics = ShapeStatistics()
        self._queue = PlanQueue(planner, self._differing.kinds.is_gone)
        self._refused: set[CallShape] = set()
        self._doubted: set[CallShape] = set()  # watched next time: steps ran otherwise than their derived graphs
        self._budget_bytes: int | None = None  # None before the first watched step
        self._planned_s = 0.0  # of answers that are there
        self._choice_after = 0  # so many steps: another look at which shapes are worth a plan
        self._num_steps = 0
        self._in_vain = 0  # plans that came since one of them has served a step
        self._afresh_at, self._times_afresh = -STEPS_REMEMBERED, 0  # see ``start_afresh``: after which step, in a row

    @property
    def plans(self) -> list[PlannedStep]:
        return self._at_hand.plans

    @property
    def seen(self) -> set[CallShape]:
        return self._told.seen

    @property
    def least_bytes(self) -> dict[CallShape, int]:
        return self._told.least_bytes

    @property
    def planning_s(self) -> float:
        """Seconds that the planner took in all, for what is not there yet as well."""
        return self._planned_s + self._asked_s

    @property
    def _asked_s(self) -> float:
        return 0.0 if self._queue.asked is None else self._queue.asked.pending.planning_s

    # -- which plan -----------------------------------------------------------------------------------------

    def plan_for(self, shape: CallShape) -> PlannedStep | None:
        """The plan for a step that starts with a call of ``shape``; None: there is none, or it wants another watch."""
        self._adopt_plans()
        self._num_steps += 1
        self._statistics.saw(shape)
        latest = self.plans[-1] if self.plans else None
        as_before = latest is not None and latest.shapes[0] == shape == latest.last_served and not latest.diverged
        if as_before and shape not in self._doubted:
            self._in_vain = 0
            return latest
        self.seen.add(shape)
        if shape in self._doubted and shape not in self._refused:
            return None
        found = self._serving(shape)
        if found is not None and found.diverged and not self._keep_diverged(found):
            found = self._serving(shape)
        if found is None or found.shapes[0].has_gradients != shape.has_gradients:
            found = self._from_other_micro_batch(shape, found)
        if found is None or found.shapes[0] != shape:
            if self._is_family_shape(shape):
                found = self._plan_unwatched(shape, found)
            elif found is not None and self._wants_own_plan(shape, found):
                return None
        if found is None:
            return None
        self._in_vain = 0
        self._at_hand.use(found, shape)
        return found

    def wants_graph(self, shape: CallShape) -> bool:
        """Whether a watched step of ``shape`` should be recorded.

        Where plan after plan serves no step, since each is of another shape, few are: recording costs more than a step.
        A shape that follows from others is no such: its plan is made anyhow, and this step is what it is compared with.
        """
        if shape in self._refused or self._differing.run_online(shape.pattern):
            return False
        if self._in_vain >= _MOST_IN_VAIN and self._num_steps % _THEN_EVERY and not self._is_family_shape(shape):
            return False
        return not self._is_waiting_for(shape) or self._statistics.wants(shape)

    def _is_waiting_for(self, shape: CallShape) -> bool:
        """Whether a plan that will serve ``shape`` is asked for."""
        return any(s == shape if shape in self._differing.alone else s.covers(shape) for s in self._queue.first_shapes)

    def _serving(self, shape: CallShape) -> PlannedStep | None:
        """The plan of ``shape``, or of those whose shape covers it the one that recomputes least."""
        if shape.pattern in self._differing.unsteady:
            return None
        exact = self._at_hand.of_shape(shape)
        if exact is not None or shape in self._differing.alone:
            return exact
        return self._at_hand.covering(shape)

    def _from_other_micro_batch(self, shape: CallShape, found: PlannedStep | None) -> PlannedStep | None:
        """The plan for a step that adds to gradients from that of the step that makes them, or the other way round.

        The forward ops are the same. Where the other's decisions fit, and cost nothing to speak of, they are taken;
        else the planner is asked for others. Until its answer is there, a plan that covers the step serves it; where
        there is none, one is made quickly.

        Args:
            found: The best plan so far, which is returned where there is no better one.
        """
        twin = shape.without_gradients() if shape.has_gradients else shape.with_gradients()
        other = self._at_hand.of_shape(twin)
        if other is None or shape in self._refused | self._differing.alone or self._is_waiting_for(shape):
            return found
        if self.is_sharded:  # gradients are made whole, and reduced: only a watch tells
            return found
        budget_bytes = self._budget_bytes or other.plan.budget_bytes
        if budget_bytes is None:
            return found
        if shape.has_gradients:
            graph = self._adding.as_steps_are(shape.pattern, with_gradients_before(other.graph))
            shapes = tuple(s.with_gradients() for s in other.shapes)
        elif other.plan.predicted_overhead > _WORTH_OWN_PLAN:
            graph = with_gradients_made(other.graph)
            shapes = tuple(s.without_gradients() for s in other.shapes)
        else:
            return found
        self._known.follow(other, shapes, graph)
        if shape.has_gradients:
            with suppress(LowtideError):
                plan = with_decisions_of(replace(other.plan, budget_bytes=budget_bytes), graph, other.costs)
                return self._put_in_force(shapes, graph, other.costs, plan)
        self._ask(shapes, graph, other.costs, budget_bytes)
        is_quick = len(graph.events) <= _MOST_EVENTS_AT_ONCE
        if found is not None or not is_quick or self._options.method != "exact" or self._tiers.capacities:
            return found
        with suppress(LowtideError):  # the planner's answer tells
            try:
                plan = solve(graph, other.costs, budget_bytes, effort="first")
            except BudgetInfeasibleError as error:
                self.least_bytes[shape] = error.least_bytes
                plan = solve(graph, other.costs, error.least_bytes, effort="first")
            return self._put_in_force(shapes, graph, other.costs, plan)
        return found

    def _wants_own_plan(self, shape: CallShape, served_by: PlannedStep) -> bool:
        """While the planner is idle and there is room: a shape that recomputes more than it would have to."""
        if served_by.keeps_everything or shape in self._refused or self._queue.asked is not None:
            return False
        if len(self.plans) >= self._options.max_plans:
            return False
        return shape.share_of(served_by.shapes[0]) <= _MUCH_SMALLER

    def note_kind(self, shape: CallShape, kind: int | None) -> None:
        """A step has ended that began with a call of ``shape``; see ``RunningStep.kind``."""
        self._differing.kinds.note(shape.pattern, kind)
        if self._differing.kinds.waits_in_vain(shape.pattern):
            self._reasons.say(f"steps run other ops each time {_RUN_ONLINE}")

    def note_gradients(self, shape: CallShape, *, adds: bool) -> None:
        """A step has ended that began with gradients and a call of ``shape``.

        Args:
            adds: They were there when its backward began. Else ``zero_grad`` had let go of them: steps have that much
                more room in backward.
        """
        pattern = shape.pattern
        if self.is_sharded or not self._adding.note(pattern, adds=adds):
            return
        as_steps_are = partial(self._adding.as_steps_are, pattern)
        if adds:
            self._statistics.forget(shape)
        for planned in [p for p in self.plans if p.shapes[0].pattern == pattern]:
            graph = as_steps_are(planned.graph)
            if graph is not planned.graph and (adds or not planned.keeps_everything):
                if adds:
                    self._at_hand.let_go(planned)
                self._ask_of(planned, graph)
        self._change_graphs(lambda of, graph: as_steps_are(graph) if of == pattern else graph)

    def note_state(self, state_bytes: int, budget_bytes: int) -> None:
        """An optimizer has stepped for the first time: all together keep that. What is planned from now on knows it.

        Plans that are there are looked at when a step begins under them; see ``correct_state``.
        """
        if budget_bytes != self._budget_bytes and self._budget_bytes is not None:
            self.change_budget(budget_bytes)
        self._statistics.change_graphs(lambda graph: with_resident(graph, "optimizer", state_bytes))
        self._change_graphs(lambda _, graph: with_resident(graph, "optimizer", state_bytes))

    def _change_graphs(self, changed: Callable[[str, StepGraph], StepGraph]) -> None:
        """What is known and asked for is of ``changed(pattern, graph)``, whose forward ops are the same."""
        self._known.change_graphs(changed)
        self._queue.change_graphs(changed)
        self._ask_next()

    def note_step(self, planned: PlannedStep, num_nodes: Mapping[int, int], *, diverged: bool) -> None:
        """A step has ended that began under ``planned``.

        Args:
            num_nodes: How many autograd nodes each call made.
            diverged: The step ran other ops.
        """
        pattern = planned.shapes[0].pattern
        planned.diverged = diverged
        self._differing.note(pattern, differed=diverged)
        if not planned.is_known and not diverged and len(num_nodes) == len(planned.shapes):
            planned.num_nodes = num_nodes
        planned.tape.matches_all = self._differing.may_differ(pattern)

    def why_no_plan(self, shape: CallShape) -> str:
        """In words, where ``plan_for`` has none."""
        if shape in self._refused:
            return "there is no plan for steps like the last one"
        if self._differing.run_online(shape.pattern):
            return "steps like the last one run other ops each time, so they run online"
        if self._is_waiting_for(shape):
            return f"the plan for the last step is still being made, for {self._asked_s:.0f} s by now"
        if self._in_vain >= _MOST_IN_VAIN:
            return (
                f"the last {self._in_vain} plans have served no step, since each step is of other shapes: "
                f"of {_THEN_EVERY} steps one is recorded"
            )
        return WATCHED

    def _keep_diverged(self, planned: PlannedStep) -> bool:
        """The last step under ``planned`` ran other ops: whether it is still the best there is."""
        planned.diverged = False
        verdict = self._differing.judge(planned)
        if verdict is Verdict.NO_PLAN_FITS:
            self._run_online(planned.shapes[0].pattern)
        elif verdict is Verdict.LET_GO:
            self._let_go(planned)
        return verdict is Verdict.KEEP

    def _let_go(self, planned: PlannedStep) -> None:
        """Its steps run other ops."""
        self._at_hand.let_go(planned)
        if planned.is_derived:
            self._doubted.add(planned.shapes[0])  # the next watch tells what is different
        else:
            self._statistics.forget(planned.shapes[0])

    def note_left(self, planned: PlannedStep, peak_bytes: int) -> None:
        """A step left ``planned`` and took that."""
        if self._is_too_much(planned, peak_bytes):
            self._differing.note_left_above(planned)

    def _run_online(self, pattern: str) -> None:
        """Steps that start with calls of ``pattern`` have no plan from now on."""
        num_differed, num_steps = self._differing.lately(pattern)
        self._at_hand.let_go_where(lambda planned: planned.shapes[0].pattern == pattern)
        self._reasons.say(
            f"{num_differed} of the last {num_steps} steps under a plan ran other ops than planned, or of other sizes "
            + _RUN_ONLINE
        )

    def start_afresh(self, before_bytes: int, now_bytes: int) -> None:
        """The model's parameters take other bytes: nothing is known any more of the sizes in its steps."""
        often = self._num_steps - self._afresh_at < STEPS_REMEMBERED
        self._times_afresh = self._times_afresh + 1 if often else 1
        self._afresh_at = self._num_steps
        self._at_hand.let_go_where(lambda _: True)
        self._queue.drop(lambda _: True)
        self._statistics, self.unplanned = ShapeStatistics(), UnplannedSteps()
        self._differing.start_afresh()
        for known in (self._known, self._adding, self.least_bytes, self._refused, self._doubted):
            known.clear()
        self._say_least()
        took = f"the model's parameters took {format_bytes(before_bytes)}, and take {format_bytes(now_bytes)}"
        if self._times_afresh <= MOST_REPLANS:
            self._reasons.say_latest("afresh", f"{took}: plans were for other sizes, so steps are watched again")
            return
        self._differing.unsteady |= {shape.pattern for shape in self.seen}
        self._reasons.say_latest("afresh", f"{took}, and change every few steps: no plan fits, steps run online")

    def change_budget(self, budget_bytes: int) -> None:
        """Let go of plans for more; have them made again, and those that could do with less recomputation."""
        self._budget_bytes = budget_bytes
        self._refused -= {shape for shape, least in self.least_bytes.items() if least <= budget_bytes}
        self._say_least()
        self.unplanned = UnplannedSteps()
        wrong = [p for p in self.plans if _exceeds(p, budget_bytes) or _is_tight(p, budget_bytes)]
        self._at_hand.let_go_where(lambda planned: _exceeds(planned, budget_bytes))
        self._queue.change_budget(budget_bytes)
        for p in wrong:
            self._queue.add(p.shapes, self._request_for(p.graph, p.costs, budget_bytes), p.kind)
        self._ask_next()

    def plan_anew(self, planned: PlannedStep, more_bytes: int, budget_bytes: int) -> None:
        """So much more is there before its step than ``planned`` knows: let go of it, and have the rest planned again.

        The ops are the same, so no step has to be watched for that, and nothing to be proven again. What is more may
        have come for a moment, so ``planned`` is put aside.
        """
        self._at_hand.put_aside(planned)
        graph = self._with_resident(planned, "other", more_bytes)
        if not self._is_waiting_for(planned.shapes[0]):
            self._ask(planned.shapes, graph, planned.costs, budget_bytes)

    def best_that_fits(
        self, shape: CallShape, planned: PlannedStep | None, fits: Callable[[PlannedStep], bool]
    ) -> PlannedStep | None:
        """See ``PlansAtHand``. ``planned`` is what ``plan_for`` has found."""
        return self._at_hand.best_that_fits(shape, planned, fits)

    def keep_least(self, planned: PlannedStep, more_bytes: int) -> PlannedStep:
        """So much more is there before its step, and ``planned`` is the least there is: it takes that much more."""
        shape = planned.shapes[0]
        before = self.least_bytes.get(shape, planned.plan.predicted_peak_bytes)
        least_bytes = self.least_bytes[shape] = before + more_bytes
        graph = self._with_resident(planned, "other", more_bytes)
        plan = with_decisions_of(replace(planned.plan, budget_bytes=least_bytes), graph, planned.costs)
        self._say_least()
        return self._put_in_force(planned.shapes, graph, planned.costs, plan)

    def correct_state(self, planned: PlannedStep, more_bytes: int, budget_bytes: int) -> PlannedStep | None:
        """The optimizer keeps so much more than ``planned`` knows, or less: what may run with its state as it is.

        The same decisions if they fit, until a better plan comes; else None, until another one comes.
        """
        graph, found = self._with_resident(planned, "optimizer", more_bytes), None
        with suppress(LowtideError):
            plan = with_decisions_of(replace(planned.plan, budget_bytes=budget_bytes), graph, planned.costs)
            found = self._put_in_force(planned.shapes, graph, planned.costs, plan)
        if found is None:
            self._at_hand.plans.remove(planned)
        if found is None or (more_bytes < 0 and not found.keeps_everything):
            self._queue.drop(lambda shapes: shapes == planned.shapes)
            self._ask(planned.shapes, graph, planned.costs, budget_bytes)
        return found

    def _ask_of(self, planned: PlannedStep, graph: StepGraph) -> None:
        """Have its steps planned again, with ``graph``, whose ops are the same."""
        self._known.follow(planned, planned.shapes, graph)
        if (budget_bytes := self._budget_bytes or planned.plan.budget_bytes) is not None:
            self._queue.add(planned.shapes, self._request_for(graph, planned.costs, budget_bytes), planned.kind)

    def _with_resident(self, planned: PlannedStep, part: str, more_bytes: int) -> StepGraph:
        """The graph of ``planned`` with so much more of ``part``; what is proven of its ops is proven there."""
        graph = with_resident(planned.graph, part, planned.graph.resident.get(part, 0) + more_bytes)
        self._known.follow(planned, planned.shapes, graph)
        return graph

    def put(self, planned: PlannedStep) -> None:
        """Put a plan in force in place of one for the same shapes; of too many the one used least recently goes."""
        self._refused -= set(planned.shapes)
        planned.tape.proves_at_birth = self._reasons.say_saved
        planned.tape.on_other_numbers = self._reasons.say_proven_anew
        planned.tape.on_refusal = self._reasons.say_not_moved
        self._told.say_dynamic(planned.plan)
        self._at_hand.put(planned)
        self._make_room()

    # -- shapes that nobody has watched -----------------------------------------------------------------------

    def _is_family_shape(self, shape: CallShape) -> bool:
        """Whether the graph of ``shape`` follows from others. What to plan for is estimated for method exact alone."""
        if self._options.method != "exact" or shape.pattern in self._differing.unsteady:
            return False
        return shape not in self._differing.alone | self._refused and self._statistics.knows(shape)

    def _plan_unwatched(self, shape: CallShape, found: PlannedStep | None) -> PlannedStep | None:
        """The plan for ``shape``, whose graph follows from others; what is worth another plan is asked for.

        Args:
            found: The best plan so far.
        """
        assert self._budget_bytes is not None  # the watched steps came with it
        if found is not None and found.keeps_everything:
            return found
        if self._statistics.fits_plain(shape, self._budget_bytes):
            kept = [p.shapes[0] for p in self.plans if p.keeps_everything]
            sizes = [s.sizes for s in kept if s.pattern == shape.pattern]
            together = shape._replace(sizes=join([shape.sizes, *sizes]))
            if sizes and (planned := self._keep_everything(together)):  # it replaces the smaller one
                return planned
            if len(self.plans) < self._options.max_plans and (planned := self._keep_everything(shape)):
                return planned
        wanted: CallShape | None = None
        if found is None:  # larger than all that is planned for: a plan for all that came so far
            seen = [s for s in self.seen if s.pattern == shape.pattern and self._statistics.knows(s)]
            largest = shape._replace(sizes=join(s.sizes for s in seen))
            # A plan for the largest that moves tensors is there, perhaps, and serves no other shape.
            there = {p.shapes[0] for p in self.plans}
            wanted = next((s for s in (largest, shape) if s not in there and self._statistics.knows(s)), None)
        elif self._queue.asked is None and self._num_steps >= self._choice_after:
            tops = [p.shapes[0].sizes for p in self.plans if p.shapes[0].pattern == shape.pattern]
            wanted = self._statistics.next_shape(shape, tops, self._budget_bytes, self._options.max_plans)
            if wanted is None:
                self._choice_after = self._num_steps + 1 + self._num_steps // 4
        if wanted is None or wanted in self._refused or self._is_waiting_for(wanted):
            return found
        if kept_plan := self._keep_everything(wanted):
            return kept_plan if wanted.covers(shape) else self._serving(shape)  # ``found`` may have made room for it
        if (derived := self._statistics.derive(wanted)) is not None:
            shapes, known = derived
            assert known.costs is not None  # watched steps have times
            self._ask(shapes, known.graph, known.costs, self._budget_bytes)
        return found

    def _keep_everything(self, shape: CallShape) -> PlannedStep | None:
        """A plan for ``shape`` that recomputes nothing, if it fits: no planner is asked for it."""
        assert self._budget_bytes is not None
        derived = self._statistics.derive(shape) if self._statistics.fits_plain(shape, self._budget_bytes) else None
        if derived is None:
            return None
        shapes, known = derived
        assert known.costs is not None
        plan = solve(known.graph, known.costs, method="none")
        plan = replace(plan, budget_bytes=self._budget_bytes, budget_kind=self._options.budget_kind)
        if plan.budgeted_peak_bytes > self._budget_bytes:
            return None
        for smaller in [p for p in self.plans if p.keeps_everything and shape.covers(p.shapes[0])]:
            self._at_hand.let_go(smaller)
        planned = self._put_in_force(shapes, known.graph, known.costs, plan)
        self._told.tell(plan, len(self.plans), "a shape that follows from others: fits without recompute, not planned")
        return planned

    def _make_room(self) -> None:
        """Let go of a plan, if there are too many: of the one that is missed least, as far as that is known."""
        while len(self.plans) > self._options.max_plans:
            *before, new = (p.shapes[0] for p in self.plans)
            gone = 0  # used least recently
            if self._budget_bytes is not None and all(
                s.pattern == new.pattern and self._statistics.knows(s) for s in before
            ):
                gone = self._statistics.least_missed(new, [shape.sizes for shape in before], self._budget_bytes)
            del self.plans[gone]

    # -- asking ---------------------------------------------------------------------------------------------

    def request(
        self,
        shapes: Shapes,
        graph: StepGraph,
        costs: Costs,
        budget_bytes: int,
        num_nodes: Mapping[int, int],
        kind: int | None,
        flags: tuple,
        proven_ops: frozenset[int],
    ) -> None:
        """A step was watched whose calls have these shapes: have it planned, unless a plan for it is on its way.

        Args:
            num_nodes: How many autograd nodes each call made.
            kind: See ``RunningStep.kind``.
            proven_ops: Those of the graph that need no other proof under these global ``flags``.
        """
        pattern = shapes[0].pattern
        if not self._differing.kinds.is_worth_a_plan(pattern, kind):
            return
        if self._adding.adds(pattern):
            graph = self._adding.as_steps_are(pattern, graph)
        self._known.note(shapes, KnownStep(num_nodes, kind, graph, flags, proven_ops))
        self._budget_bytes = budget_bytes
        self._doubted.discard(shapes[0])
        if reason := self._statistics.note(shapes, graph, costs):
            self._reasons.say(f"a step was not as derived from other lengths, so such steps are watched: {reason}")
            self._let_go_of_derived(shapes[0])
        if not self._is_waiting_for(shapes[0]):
            self._ask(shapes, graph, costs, budget_bytes)

    def _let_go_of_derived(self, like: CallShape) -> None:
        """Plans from derived graphs of this way to call the model, and what is asked for."""
        self._at_hand.let_go_where(lambda p: p.is_derived and p.shapes[0].pattern == like.pattern)
        self._queue.drop(lambda shapes: shapes[0].pattern == like.pattern)

    def _ask(self, shapes: Shapes, graph: StepGraph, costs: Costs, budget_bytes: int) -> None:
        self._queue.add(shapes, self._request_for(graph, costs, budget_bytes), self._known.of(shapes).kind)
        self._ask_next()

    def _ask_next(self) -> None:
        self._queue.ask_next([p.shapes for p in self.plans])

    def _request_for(self, graph: StepGraph, costs: Costs, budget_bytes: int) -> PlanRequest:
        options, tiers = self._options, self._tiers.capacities
        costs = replace(costs, links=self._tiers.links())
        return PlanRequest(
            graph, costs, budget_bytes, options.method, tiers, options.solver, cache_dir=PlanCache().directory
        )

    def refuse(self, shape: CallShape, why: str, *, saved: bool = False) -> None:
        """There will be no plan for steps that start with a call of ``shape``; ``saved``: nor are they watched."""
        self._refused.add(shape)
        self._doubted.discard(shape)
        how = "all is saved in them" if saved else "they run online"
        self._told.say_refused(shape, f"{how}: {why}", self._refused)
        self._say_least()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until no answer of the planner is outstanding. Raises: TimeoutError."""
        while self._queue.asked is not None:
            with suppress(LowtideError):  # ``_adopt`` says it
                self._queue.asked.pending.plan(timeout_s)
            self._adopt_plans()

    def _adopt_plans(self) -> None:
        """Put in force what has come back from the planner."""
        asked = self._queue.asked
        if asked is None:
            return
        if asked.pending.done():
            self._queue.asked = None
            self._adopt(asked)
            self._ask_next()
        elif asked.num_seen < (num_answers := asked.pending.num_answers):
            asked.num_seen = num_answers
            with suppress(LowtideError):  # the final answer tells
                asked.first = self._adopted(asked, asked.pending.newest())
                self._ask_next()

    def _adopt(self, asked: Asked) -> None:
        pending = asked.pending
        self._planned_s += pending.planning_s
        if pending.reason:
            self._reasons.say_first(pending.reason.partition(":")[0], pending.reason)
        try:
            planned = self._adopted(asked, pending.plan())
        except BudgetInfeasibleError as error:
            self._note_least(asked, error)
        except TierError as error:
            self._tiers.drop(error)
            self._queue.add(asked.shapes, replace(asked.request, offload={}), asked.kind)
        except LowtideError as error:
            why = str(error).splitlines()[0]
            if any(planned is asked.first for planned in self.plans):
                self._reasons.say(f"the planner's first plan{self._told.which(asked.shapes[:1])} stays in force: {why}")
            else:
                self.refuse(asked.shapes[0], why)
        else:
            made = "found the plan of an earlier run" if pending.source == "cache" else "planned beside training"
            whose = "a shape that follows from others: " if planned.is_derived else ""
            self._told.tell(planned.plan, len(self.plans), f"{whose}{made} in {pending.planning_s:.1f} s")

    def _note_least(self, asked: Asked, error: BudgetInfeasibleError) -> None:
        """No plan fits the budget: the one at the least there is comes next, or none, if steps without took less."""
        shape, least = asked.shapes[0], error.least_bytes
        self.least_bytes[shape] = least
        if why := self._why_worse(shape, least, asked.request.graph.before_bytes, None):
            self.refuse(shape, why)
            return
        self._say_least()
        self._queue.add(asked.shapes, replace(asked.request, budget=least), asked.kind)

    def allowed_bytes(self, planned: PlannedStep) -> int:
        """What a step under a plan may take: the budget, or what steps without one take."""
        return self.unplanned.allowed_bytes(planned.shapes[0], planned.graph.before_bytes, self._budget_bytes or 0)

    def _why_worse(self, shape: CallShape, peak_bytes: int, start_bytes: int, step_ms: float | None) -> str:
        return self.unplanned.why_worse(shape, peak_bytes, start_bytes, step_ms, self._budget_bytes or 0)

    def note_peak(self, planned: PlannedStep, peak_bytes: int) -> bool:
        """A step under ``planned`` took that: whether it is more than the plan is worth.

        It is then let go of, as where a step runs other ops: the next step is watched.
        """
        if not self._is_too_much(planned, peak_bytes):
            return False
        self._differing.note_worthless(planned)
        return True

    def _is_too_much(self, planned: PlannedStep, peak_bytes: int) -> bool:
        allowed = max(self.allowed_bytes(planned), planned.plan.measurable_peak_bytes)
        return peak_bytes > (1 + _PEAK_TOLERANCE) * allowed

    def _say_least(self) -> None:
        self._told.say_least(self._budget_bytes or 0, self._refused)

    def _adopted(self, asked: Asked, plan: Plan) -> PlannedStep:
        """Raises: _PlanWorseThanNoneError: steps without one are better."""
        start_bytes = asked.request.graph.before_bytes
        if why := self._why_worse(asked.shapes[0], plan.budgeted_peak_bytes, start_bytes, plan.predicted_step_ms):
            raise _PlanWorseThanNoneError(why)
        planned = self._put_in_force(asked.shapes, asked.request.graph, asked.request.costs, plan)
        if asked.first is not None or asked.had_first:
            self._in_vain -= 1  # what comes in place of the planner's first answer is no further plan
        return planned

    def _put_in_force(self, shapes: Shapes, graph: StepGraph, costs: Costs, plan: Plan) -> PlannedStep:
        model = self._model()
        assert model is not None  # it is being called
        tape = Tape(program_of(plan), model, self._tiers.open_for(plan))
        tape.matches_all = self._differing.may_differ(shapes[0].pattern)
        self._in_vain += 1
        known = self._known.of(shapes)
        known.tell(tape, graph)
        planned = PlannedStep(plan, graph, costs, shapes, tape, num_nodes=known.num_nodes, kind=known.kind)
        self.put(planned)
        return planned


def _exceeds(planned: PlannedStep, budget_bytes: int) -> bool:
    return planned.plan.budgeted_peak_bytes > budget_bytes


def _is_tight(planned: PlannedStep, budget_bytes: int) -> bool:
    """Whether a plan recomputes for a budget that was below ``budget_bytes``."""
    return not planned.keeps_everything and (planned.plan.budget_bytes or budget_bytes) < budget_bytes
