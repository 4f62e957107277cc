"""The exact method: the least recomputation whose *simulated* peak stays within the budget.

A MILP (``peak_model.py``) chooses, the simulator judges, and each moment at which the judge finds more memory than the
model becomes a cut, until they agree. What comes back never exceeds the budget by the simulator. Steps too large for
one MILP are planned segment by segment out of a common pool (``columns.py``).

The search's own bound is that of the first, uncut model. It tells when to stop, and holds for all plans of that model:
every plan that replays once on a graph small enough to be modelled op by op; on larger ones those that replay each
group of ops as a whole, at most once, and, where segments are planned apart, inside its segment. What a plan shows is
``bound.py``'s.

Where the models end, at and below the least peak that replaying once can have, local search goes on from the leanest
way they know (``leaner.py``), and schedules of the chain methods stand beside it (``rotor.py``, ``revolve.py``). No
clock has a say in this part, so that the least peak is the same whenever it is asked for.

Known weaknesses: what replays an op more than once is found by local search, not proven best; on large graphs the
least peak is the best found, not proven.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import highspy
import numpy as np

from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import RUN, UNPACK, StepGraph
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.simulator import Timeline
from lowtide.solvers.bound import bound_peak, bound_time
from lowtide.solvers.classics import BUDGETED, classic_actions, offers
from lowtide.solvers.columns import Choice, Decomposition
from lowtide.solvers.draft import Draft, infeasible
from lowtide.solvers.groups import Sketch
from lowtide.solvers.guided import guided
from lowtide.solvers.highs import Answer, left_s
from lowtide.solvers.leaner import Judged, judge, leaner
from lowtide.solvers.offers import Offer, fastest_within, leanest, stored_at_the_turn
from lowtide.solvers.peak_model import PeakModel
from lowtide.solvers.segments import segments, windows, worth_replaying
from lowtide.solvers.stretches import Stretches
from lowtide.solvers.structure import close, droppable

_ROUNDS = 12
_CUTS_A_ROUND = 40
_WHOLE_SIZE = 2000  # steps up to this size (``Sketch.size``) are one model, whose replays reach over the whole step
_UNLIKE_SIZE = 6000  # likewise, where segments hardly repeat
_WHOLE_OPS = 300  # steps with more ops worth replaying are not even sketched as one
_FEWEST_SEGMENTS = 3  # that planning them apart is worth it
_NEAR = 0.004  # of the step, above the bound: near enough to it
_FAR = 0.02  # likewise: too far for a sharper bound alone to close
_LISTED_OPS = 5000  # steps up to this size are held against every plan of the classics
_GAP = 0.01  # of the recompute time, tolerated on graphs that are not modelled op by op
_STEP_GAP = 0.0025  # of the step time, likewise
_CLEAN_UP_EVENTS = 400_000  # simulated, at most, to clean up
_LEANER_EVENTS = 1_500_000  # simulated, at most, to find the least peak
_ABOVE = (0.02, 0.03, 0.05)  # of activation memory: budgets above the one asked for, to come down from
_ABOVE_EVENTS = 1_200_000  # simulated, at most, to come down from one of them
_ABOVE_TRIES = 150  # that have to be possible in so many
_GUIDED_EVENTS = 4_000_000  # likewise, from one start that the bound's relaxation points to
_ROUNDED_EVENTS = 2_000_000  # likewise, to bring what a relaxation rounds to within the budget
_HOPELESS = 0.05  # of the step time above the relaxation's bound: rounding that gets there has gone astray
_SHARES = (0.25, 0.5, 0.75)  # what a relaxation keeps by less than this is recomputed
_LEAN_SIZE = 600  # steps up to this size (``Sketch.size``) ask a MILP for the least peak, larger ones its relaxation
_LEAN_NODES = 10  # there good answers come from the root, a proof from thousands of nodes


Choose = Callable[[int, float], "Choice | None"]  # within so many bytes, until so late


@dataclass(frozen=True)
class Limits:
    """How long to search.

    Attributes:
        time_limit_s: For each stage of the search for the fastest; a safety net, since what it cuts off differs from
            run to run. The search for the least peak has limits of its own, that no clock moves.
        node_limit: Branch-and-bound nodes of one MILP.
        gap: Relative to the recompute time; None: 0 on tiny graphs, 1 % on others.
        effort: Of local search, 1 being all that it may simulate.
        longer: Whether to try segments of several layers where one layer a segment leaves a plan far from its bound;
            not with less than all effort.
    """

    time_limit_s: float = 60.0
    node_limit: int = 1000
    gap: float | None = None
    effort: float = 1.0
    longer: bool = True


def exact(graph: StepGraph, costs: Costs, budget_bytes: int, limits: Limits) -> Draft:
    """Return the fastest actions within ``budget_bytes``.

    Raises:
        BudgetInfeasibleError: no actions were found that need so little.
    """
    return Search(graph, costs, limits).within(budget_bytes)


@dataclass(frozen=True)
class _Result:
    """What ``fastest`` tried, the last one within the budget if any is; ``proven``: nothing in the model is faster."""

    judged: list[Judged]
    proven: bool
    bound_ms: float

    @property
    def best_ms(self) -> float:
        return self.judged[-1].timeline.step_ms if self.judged else 0.0

    def best_within(self, budget_bytes: int) -> float:
        return min((j.timeline.step_ms for j in self.judged if j.peak_bytes <= budget_bytes), default=math.inf)


class Search:
    """The search on one step; asking it for several budgets shares what it has learnt."""

    def __init__(self, graph: StepGraph, costs: Costs, limits: Limits) -> None:
        self.graph, self.costs, self.limits = graph, costs, limits
        # Whatever is recomputed, the tape's watching of forward is paid in full.
        self.floor_ms = costs.plain_step_ms + costs.mode_us / 1e3 * len(graph.forward_ops)
        ops = worth_replaying(graph)
        self.sketch = Sketch(graph, costs) if len(ops) <= _WHOLE_OPS else None
        self.fine = self.sketch is not None and self.sketch.fine
        self.pool = None if self._one_model_does() else self._pool(ops)
        if self.pool is None and (self.sketch is None or self.sketch.size > _UNLIKE_SIZE):
            self.sketch = Sketch(graph, costs, reach=0)
        self.plain = self.judge(close(graph, ()))

    def _one_model_does(self) -> bool:
        return self.sketch is not None and self.sketch.size <= _WHOLE_SIZE

    def _pool(self, ops: list[int]) -> Decomposition | None:
        segment_of = segments(self.graph, ops)
        found = windows(self.graph, segment_of)
        if found is None or len(found) < _FEWEST_SEGMENTS:
            return None
        pool = Decomposition(self.graph, self.costs, segment_of, found)
        unlike = 2 * len(pool.different) > len(found) + 1
        return None if unlike and self.sketch is not None and self.sketch.size <= _UNLIKE_SIZE else pool

    def within(self, budget_bytes: int, *, at_any_price: bool = True) -> Draft:
        """The fastest actions within ``budget_bytes``.

        Args:
            at_any_price: Where the search finds nothing, see whether what is near the least peak would do.

        Raises:
            BudgetInfeasibleError: no actions were found that need so little.
        """
        if self.plain.peak_bytes <= budget_bytes:
            return self.draft(self.plain, "optimal", self.costs.plain_step_ms)
        result = _Result([], False, self.floor_ms) if self._impossible(budget_bytes) else self.fastest(budget_bytes)
        fitting = [j for j in result.judged if j.peak_bytes <= budget_bytes]
        if not fitting:
            if not at_any_price:
                raise BudgetInfeasibleError("nothing found", budget_bytes=budget_bytes, least_bytes=budget_bytes + 1)
            return self._near_the_least(budget_bytes)
        best = min(fitting, key=lambda j: j.rank)
        best = min((best, *self._classics_that_may_beat(best, budget_bytes)), key=lambda j: j.rank)
        best = min((best, *self._offered(budget_bytes)), key=lambda j: j.rank)
        status = "optimal" if result.proven and best.timeline.step_ms <= result.best_ms else "feasible"
        best = self._cleaned(best, budget_bytes)
        return self.draft(best, status, min(result.bound_ms, best.timeline.step_ms))

    def _impossible(self, budget_bytes: int) -> bool:
        # One that fits is sooner found than the proof.
        mild = (actions for actions in self._classic_actions if self._kept_bytes(actions) <= budget_bytes)
        if any(self.judge(actions).peak_bytes <= budget_bytes for actions in mild):
            return False
        return budget_bytes < bound_peak(self.graph)

    def _near_the_least(self, budget_bytes: int) -> Draft:
        """Where the search finds nothing: the best of what is known, schedules that replay an op often among it.

        Raises:
            BudgetInfeasibleError: nothing known needs so little.
        """
        known = [j for j in self.classics if j.peak_bytes <= budget_bytes]
        for path in self._paths:
            known += [j for j in path if j.peak_bytes <= budget_bytes][:1]
        chain = fastest_within(self.graph, self.costs, self._often, budget_bytes)
        if chain is not None:
            known.append(self.judge(chain.actions, chain.replays))
        if not known:
            least = self.least
            if least.peak_bytes > budget_bytes:
                raise infeasible(
                    self.graph, self.costs, budget_bytes, least.actions, method="exact", replays=least.replays
                )
            known = [least]
        cleaned = [self._cleaned(j, budget_bytes) for j in known]
        return self.draft(min(cleaned, key=lambda j: j.rank), "feasible", self.floor_ms)

    def _cleaned(self, judged: Judged, budget_bytes: int) -> Judged:
        return self.save_what_fits(self.lower_peak(judged), budget_bytes)

    @cached_property
    def _often(self) -> list[Offer]:
        """Schedules that replay an op often."""
        try:
            return [*offers(self.graph, self.costs, "rotor"), *offers(self.graph, self.costs, "revolve")]
        except ValueError:  # no layer repeats
            return []

    @cached_property
    def _budgeted(self) -> list[list[Offer]]:
        """What each classic with a plan for every budget would do, where listing that takes little time."""
        found = []
        for method in BUDGETED if len(self.graph.ops) <= _LISTED_OPS else ():
            try:
                found.append(offers(self.graph, self.costs, method))
            except ValueError:  # no layer repeats
                continue
        return found

    def _offered(self, budget_bytes: int) -> list[Judged]:
        """Their plans for this budget: a search that stops within its tolerance may stop just above one."""
        drafts = [fastest_within(self.graph, self.costs, offered, budget_bytes) for offered in self._budgeted]
        return [self.judge(draft.actions, draft.replays) for draft in drafts if draft is not None]

    @cached_property
    def classics(self) -> list[Judged]:
        """What to be at least as good as."""
        return [self.judge(actions) for actions in self._classic_actions]

    @cached_property
    def _classic_actions(self) -> list[dict[int, str]]:
        return classic_actions(self.graph)

    def _classics_that_may_beat(self, best: Judged, budget_bytes: int) -> list[Judged]:
        """Those that fit, leaving out what takes no simulation to see: too slow, or too much saved."""
        found = []
        for actions in self._classic_actions:
            if self._least_ms(actions) <= best.timeline.step_ms and self._kept_bytes(actions) <= budget_bytes:
                judged = self.judge(actions)
                found += [judged] if judged.peak_bytes <= budget_bytes else []
        return found

    def _least_ms(self, actions: dict[int, str]) -> float:
        """Step time if nothing is replayed but what makes the storages that backward asks for."""
        asked_for, storages = droppable(self.graph), self.graph.storages
        ops = {storages[s].op for s, action in actions.items() if action == RECOMPUTE and s in asked_for}
        if not ops:
            return self.costs.plain_step_ms
        replay_ms = sum(self.costs.op_ms[op] for op in ops if op is not None)
        return self.floor_ms + replay_ms + len(ops) * (self.costs.replay_us + self.costs.record_us) / 1e3

    def _kept_bytes(self, actions: dict[int, str]) -> int:
        """What is saved and lives when backward begins."""
        storages = self.graph.storages
        held = sum(storages[s].bytes for s in stored_at_the_turn(self.graph) if actions.get(s) != RECOMPUTE)
        return self.graph.resident_bytes + held

    @cached_property
    def least(self) -> Judged:
        """The least peak that is found; the same whatever was asked before, so that asking for it succeeds."""
        known = [self.plain, *self.classics, *(path[-1] for path in self._paths)]
        chain = leanest(self.graph, self.costs, self._often)
        if chain is not None:
            known.append(self.judge(chain.actions, chain.replays))
        found = min(known, key=lambda j: (j.peak_bytes, j.timeline.step_ms))
        # Saving what need not be replayed may lower the peak again: a plan for the least is to need the least.
        while (cleaned := self._cleaned(found, found.peak_bytes)).peak_bytes < found.peak_bytes:
            found = cleaned
        return found

    @cached_property
    def _paths(self) -> list[list[Judged]]:
        """From the leanest that the models and the classics know to ways that nothing nearby beats."""
        starts = [*self._lean()[-1:], min((self.plain, *self.classics), key=lambda j: (j.peak_bytes, *j.rank))]
        return [leaner(self.graph, self.costs, start, events=self._events(_LEANER_EVENTS)) for start in starts]

    def judge(self, actions: dict[int, str], replays: dict[int, int] | None = None) -> Judged:
        return judge(self.graph, self.costs, actions, replays)

    def draft(self, judged: Judged, status: str, bound_ms: float) -> Draft:
        solver = {"solver": f"HiGHS {highspy.Highs().version()}"}
        return Draft(judged.actions, status, bound_ms, solver, judged.replays)

    def fastest(self, budget_bytes: int) -> _Result:
        """Solve, judge, cut, until the judge agrees."""
        if self.pool is not None:
            result = self._fastest_of_pools(self.pool, budget_bytes)
            if self.limits.gap != 0 or result.proven or self.sketch is None:
                return result
            # No excess is tolerated: what a pool has no columns for, a model of all layers at once may find.
            whole = self._fastest_of_model(Sketch(self.graph, self.costs, reach=0), budget_bytes)
            return min(result, whole, key=lambda r: r.best_within(budget_bytes))
        assert self.sketch is not None
        return self._fastest_of_model(self.sketch, budget_bytes)

    def _fastest_of_model(self, sketch: Sketch, budget_bytes: int) -> _Result:
        model = PeakModel(sketch, budget_bytes)
        judged, bound_ms = ([], self.floor_ms) if self.fine else self._rounded(model, budget_bytes)
        if any(self._near_enough(j, bound_ms) for j in judged):
            return _Result(judged, True, bound_ms)
        proven = True
        deadline = time.perf_counter() + self.limits.time_limit_s
        for round_ in range(_ROUNDS):
            answer = self._minimise(model, deadline, nodes=self.limits.node_limit)
            if round_ == 0 and answer.status != "infeasible":
                bound_ms = self.floor_ms + max(answer.bound - model.objective_slack, 0.0) * model.ms_unit
            proven &= answer.status == "optimal"
            if not len(answer.values):
                break
            judged.append(self.judge(close(self.graph, *model.choice(answer.values))))
            if judged[-1].peak_bytes <= budget_bytes or time.perf_counter() > deadline:
                break
            # A moment that the model has not looked at yet is no loss; a corrected one may take better plans with it.
            proven &= self._cut(model, answer.values, judged[-1].timeline, budget_bytes)
        return _Result(judged, proven, bound_ms)

    def _rounded(self, model: PeakModel, budget_bytes: int) -> tuple[list[Judged], float]:
        """What the relaxation rounds to, changed until it is within the budget; and the relaxation's bound."""
        relaxed = model.program.relax()
        if not math.isfinite(relaxed.objective):
            return [], self.floor_ms
        bound_ms = self.floor_ms + max(relaxed.objective - model.objective_slack, 0.0) * model.ms_unit
        found: list[Judged] = []
        for share in _SHARES:
            start = self.judge(close(self.graph, *model.choice(relaxed.values, share)))
            path = leaner(
                self.graph,
                self.costs,
                start,
                target_bytes=budget_bytes,
                most_ms=min([bound_ms + _HOPELESS * self.costs.plain_step_ms, *(j.timeline.step_ms for j in found)]),
                events=self._events(_ROUNDED_EVENTS),
            )
            if path[-1].peak_bytes <= budget_bytes:
                found.append(self.save_what_fits(path[-1], budget_bytes))
            if found and self._near_enough(found[-1], bound_ms):
                break
        return sorted(found, key=lambda j: j.rank, reverse=True), bound_ms

    def _near_enough(self, judged: Judged, bound_ms: float) -> bool:
        gap, slack_ms = self._tolerances()
        ms = judged.timeline.step_ms
        return ms - bound_ms <= max(slack_ms, gap * (ms - self.floor_ms))

    def _fastest_of_pools(self, pool: Decomposition, budget_bytes: int) -> _Result:
        """A layer a segment; stretches of several, where that leaves the plan far from what no plan can beat."""
        slack_ms = self._tolerances()[1]

        def one_by_one(asked_bytes: int, deadline: float) -> Choice | None:
            return pool.solve(asked_bytes, slack_ms, deadline)

        result = self._fastest_choice(one_by_one, budget_bytes)
        if not self.limits.longer or self.limits.effort < 1:
            return result
        bound = bound_time(self.graph, self.costs, budget_bytes)
        enough_ms = bound.step_ms + _NEAR * self.costs.plain_step_ms
        # Near the least peak there may be nothing yet: that is for ways that replay an op more than once.
        if not enough_ms < result.best_within(budget_bytes) < math.inf:
            return result

        def in_stretches(asked_bytes: int, deadline: float) -> Choice | None:
            return self._stretches.choose(asked_bytes, bound.ms_per_byte, deadline)

        longer = self._fastest_choice(in_stretches, budget_bytes)
        if longer.best_within(budget_bytes) < result.best_within(budget_bytes):
            result = longer
        most_ms = result.best_within(budget_bytes)
        found: list[Judged] = []
        if most_ms > bound.step_ms + _FAR * self.costs.plain_step_ms:
            events = self._events(_GUIDED_EVENTS)
            found = guided(self.graph, self.costs, budget_bytes, most_ms=most_ms, enough_ms=enough_ms, events=events)
        deep = _ABOVE_TRIES * len(self.graph.events) > _ABOVE_EVENTS
        if most_ms > enough_ms and not (found or deep):
            found = self._from_above(in_stretches, budget_bytes, most_ms)
        result.judged.extend(found)
        return result

    def _from_above(self, choose: Choose, budget_bytes: int, most_ms: float) -> list[Judged]:
        """Faster ways than ``most_ms``: what larger budgets choose, changed a little until it is within this one.

        Columns know neither every way to run a segment nor replays across their borders; a change may be either.
        """
        found: list[Judged] = []
        activations = self.plain.peak_bytes - self.graph.resident_bytes
        for share in _ABOVE:
            choice = choose(budget_bytes + int(share * activations), math.inf)
            if choice is None:
                continue
            start = self.judge(choice.actions, choice.replays)
            path = leaner(
                self.graph, self.costs, start, target_bytes=budget_bytes, most_ms=most_ms,
                events=self._events(_ABOVE_EVENTS),
            )  # fmt: skip
            if path[-1].peak_bytes <= budget_bytes and path[-1].timeline.step_ms < most_ms:
                found.append(path[-1])
                most_ms = path[-1].timeline.step_ms
        return found

    @cached_property
    def _stretches(self) -> Stretches:
        assert self.pool is not None
        return Stretches(self.pool)

    def _fastest_choice(self, choose: Choose, budget_bytes: int) -> _Result:
        """Segments planned apart: what the judge finds above the budget is asked for less."""
        judged: list[Judged] = []
        bound_ms, asked_bytes = self.floor_ms, budget_bytes
        deadline = time.perf_counter() + self.limits.time_limit_s
        for round_ in range(_ROUNDS):
            choice = choose(asked_bytes, deadline)
            if choice is None:
                break
            if round_ == 0:
                bound_ms += choice.bound_ms
            judged.append(self.judge(choice.actions, choice.replays))
            over_bytes = judged[-1].peak_bytes - budget_bytes
            if over_bytes > 0:
                judged += self._just_within(judged[-1], budget_bytes)
            if judged[-1].peak_bytes <= budget_bytes or time.perf_counter() > deadline:
                break
            asked_bytes -= over_bytes
        return _Result(judged, bool(judged) and self._near_enough(judged[-1], bound_ms), bound_ms)

    def _just_within(self, judged: Judged, budget_bytes: int) -> list[Judged]:
        """A way within the budget that is hardly slower than ``judged``, if changing a little leads to one."""
        events = self._events(_CLEAN_UP_EVENTS)
        path = leaner(self.graph, self.costs, judged, target_bytes=budget_bytes, events=events)
        within = path[-1].peak_bytes <= budget_bytes
        slack_ms = _STEP_GAP * self.costs.plain_step_ms
        return path[-1:] if within and path[-1].timeline.step_ms <= judged.timeline.step_ms + slack_ms else []

    def _lean(self) -> list[Judged]:
        """Candidates for the least peak."""
        if self.pool is not None:
            # Not out of the pool that other budgets have filled: what is found must not depend on what came before.
            choice = self.pool.afresh().leanest()
            return [self.judge(choice.actions, choice.replays)]
        assert self.sketch is not None
        model = PeakModel(self.sketch, None)
        values = model.program.relax().values
        judged = [self.judge(close(self.graph, *model.choice(values)))] if len(values) else []
        for _ in range(_ROUNDS if self.sketch.size <= _LEAN_SIZE else 0):
            nodes = self.limits.node_limit if self.fine else _LEAN_NODES
            answer = self._minimise(model, math.inf, nodes=nodes)
            if not len(answer.values):
                break
            judged.append(self.judge(close(self.graph, *model.choice(answer.values))))
            claimed_bytes = model.claimed_peak_bytes(answer.values)
            if judged[-1].peak_bytes <= claimed_bytes:
                break
            self._cut(model, answer.values, judged[-1].timeline, claimed_bytes)
        return judged

    def lower_peak(self, judged: Judged) -> Judged:
        """Of all actions that are as fast the ones with the least peak; only on graphs that are modelled op by op."""
        if not self.fine or judged.replays:
            return judged
        assert self.sketch is not None
        model = PeakModel(self.sketch, None, most_ms=judged.timeline.step_ms - self.floor_ms)
        deadline = time.perf_counter() + self.limits.time_limit_s
        answer = self._minimise(model, deadline, nodes=self.limits.node_limit)
        if not len(answer.values):
            return judged
        other = self.judge(close(self.graph, *model.choice(answer.values)))
        # A faster one may need more than the budget: ``judged`` need not be the fastest there is.
        return other if other.rank < judged.rank and other.peak_bytes <= judged.peak_bytes else judged

    def save_what_fits(self, judged: Judged, budget_bytes: int) -> Judged:
        """Save every storage whose replay the budget does not need, the dearest first."""
        graph, ops = self.graph, self.costs.op_ms
        dropped = [s for s, action in judged.actions.items() if action == RECOMPUTE and s in graph.stored]
        kept = [s for s, action in judged.actions.items() if action == SAVE and s not in graph.stored]
        made, asked = self._spans()
        dropped.sort(key=lambda s: (-ops[graph.storages[s].op or 0], s))
        tries = self._events(_CLEAN_UP_EVENTS) // max(len(graph.events), 1)
        peaks = np.array(judged.timeline.event_peak_bytes)
        for storage in list(dropped):
            if tries == 0:
                break
            room = budget_bytes - int(peaks[made[storage] : asked.get(storage)].max(initial=0))
            if room < graph.storages[storage].bytes:
                continue
            tries -= 1
            fewer = [s for s in dropped if s != storage]
            trial = self.judge(close(graph, fewer, kept), judged.replays)
            if trial.peak_bytes <= budget_bytes and trial.rank <= judged.rank:
                judged, dropped, peaks = trial, fewer, np.array(trial.timeline.event_peak_bytes)
        return judged

    def _spans(self) -> tuple[dict[int, int], dict[int, int]]:
        """Event at which each stored storage is made, and at which backward first asks for it."""
        made: dict[int, int] = {}
        asked: dict[int, int] = {}
        for event, (kind, number) in enumerate(self.graph.events):
            if kind == RUN:
                made.update(dict.fromkeys(self.graph.ops[number].makes, event))
            elif kind == UNPACK:
                asked.setdefault(self.graph.saved[number], event)
        return made, asked

    def _events(self, most: int) -> int:
        return int(self.limits.effort * most)

    def _minimise(self, model: PeakModel, deadline: float, *, nodes: int) -> Answer:
        gap, slack_ms = self._tolerances()
        return model.program.minimise(
            gap=gap,
            slack=slack_ms / model.ms_unit,
            node_limit=min(nodes, self.limits.node_limit),
            time_limit_s=left_s(deadline),
        )

    def _tolerances(self) -> tuple[float, float]:
        """Of the recompute time, and milliseconds."""
        gap = self.limits.gap
        if gap is None:
            gap = 0.0 if self.fine else _GAP
        # What is paid for is the step: near its bound in those terms, proving more only costs time.
        slack_ms = 0.0 if self.fine or self.limits.gap is not None else _STEP_GAP * self.costs.plain_step_ms
        return gap, slack_ms

    def _cut(self, model: PeakModel, values: np.ndarray, timeline: Timeline, limit_bytes: int) -> bool:
        """Forbid the highest of the moments above ``limit_bytes``; return whether that cost no plan within it."""
        peaks = np.array(timeline.event_peak_bytes)
        above = np.flatnonzero(peaks > limit_bytes)
        above = above[np.argsort(-peaks[above], kind="stable")][:_CUTS_A_ROUND]
        replayed = {(r.event, r.peak_bytes): r.op for r in timeline.replays}
        lossless = True
        for event in above.tolist():
            peak = timeline.event_peak_bytes[event]
            lossless &= model.forbid(values, event, replayed.get((event, peak)), peak)
        return lossless
