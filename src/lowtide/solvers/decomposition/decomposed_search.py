"""A deep step, planned segment by segment: single layers first, then stretches of them, then changes on top of both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from lowtide.solvers import tuning
from lowtide.solvers.decomposition.master import Choice, ColumnGeneration
from lowtide.solvers.decomposition.multi_segment import MultiSegmentColumns
from lowtide.solvers.local_search import Evaluated, reduce_peak
from lowtide.solvers.lower_bound.bound import bound_time
from lowtide.solvers.lp_rounding import round_relaxation
from lowtide.solvers.search_context import Found, SearchContext

Choose = Callable[[int, float], "Choice | None"]  # within so many bytes, until so late


class DecomposedSearch:
    """The search with one pool."""

    def __init__(self, context: SearchContext, pool: ColumnGeneration) -> None:
        self.context, self.pool, self.stretches = context, pool, MultiSegmentColumns(pool)
        self.graph, self.costs, self.limits = context.graph, context.costs, context.limits

    def fastest(self, budget_bytes: int) -> Found:
        """A layer a segment; stretches of several, where that leaves the plan far from what no plan can beat."""
        slack_ms = self.context.tolerances()[1]

        def one_by_one(asked_bytes: int, deadline: float) -> Choice | None:
            return self.pool.solve(asked_bytes, slack_ms, deadline)

        result = self.best_choice(one_by_one, budget_bytes)
        if not self.limits.longer or self.limits.effort < 1:
            return result
        bound = bound_time(self.graph, self.costs, budget_bytes)
        enough_ms = bound.step_ms + tuning.NEAR_BOUND * self.costs.plain_step_ms
        # Near the least peak there may be nothing yet: that is for ways that replay an op more than once.
        if not enough_ms < result.best_within(budget_bytes) < math.inf:
            return result

        def in_stretches(asked_bytes: int, deadline: float) -> Choice | None:
            return self.stretches.choose(asked_bytes, bound.ms_per_byte, deadline)

        longer = self.best_choice(in_stretches, budget_bytes)
        if longer.best_within(budget_bytes) < result.best_within(budget_bytes):
            result = longer
        most_ms = result.best_within(budget_bytes)
        found: list[Evaluated] = []
        if most_ms > bound.step_ms + tuning.FAR_FROM_BOUND * self.costs.plain_step_ms:
            events = self.context.events(tuning.LP_ROUNDING_EVENTS)
            found = round_relaxation(
                self.graph, self.costs, budget_bytes, most_ms=most_ms, enough_ms=enough_ms, events=events
            )
        deep = tuning.BUDGETS_ABOVE_TRIES * len(self.graph.events) > tuning.BUDGETS_ABOVE_EVENTS
        if most_ms > enough_ms and not (found or deep):
            found = self._from_above(in_stretches, budget_bytes, most_ms)
        result.judged.extend(found)
        return result

    def _from_above(self, choose: Choose, budget_bytes: int, most_ms: float) -> list[Evaluated]:
        """Faster ways than ``most_ms``: what larger budgets choose, changed a little until it is within this one.

        Columns know neither every way to run a segment nor replays across their borders; a change may be either.
        """
        found: list[Evaluated] = []
        activations = self.context.plain.peak_bytes - self.graph.resident_bytes
        for share in tuning.BUDGETS_ABOVE:
            choice = choose(budget_bytes + int(share * activations), math.inf)
            if choice is None:
                continue
            start = self.context.judge(choice.actions, choice.replays)
            path = reduce_peak(
                self.graph, self.costs, start, target_bytes=budget_bytes, most_ms=most_ms,
                events=self.context.events(tuning.BUDGETS_ABOVE_EVENTS),
            )  # fmt: skip
            if path[-1].peak_bytes <= budget_bytes and path[-1].timeline.step_ms < most_ms:
                found.append(path[-1])
                most_ms = path[-1].timeline.step_ms
        return found

    def best_choice(self, choose: Choose, budget_bytes: int) -> Found:
        """Segments planned apart: what the judge finds above the budget is asked for less."""
        judged: list[Evaluated] = []
        bound_ms, asked_bytes = self.context.floor_ms, budget_bytes
        deadline = time.perf_counter() + self.limits.time_limit_s
        for round_ in range(tuning.DECOMPOSED_ROUNDS):
            choice = choose(asked_bytes, deadline)
            if choice is None:
                break
            if round_ == 0:
                bound_ms += choice.bound_ms
            judged.append(self.context.judge(choice.actions, choice.replays))
            over_bytes = judged[-1].peak_bytes - budget_bytes
            if over_bytes > 0:
                judged += self._just_within(judged[-1], budget_bytes)
            if judged[-1].peak_bytes <= budget_bytes or time.perf_counter() > deadline:
                break
            asked_bytes -= over_bytes
        return Found(judged, bool(judged) and self.context.near_enough(judged[-1], bound_ms), bound_ms)

    def _just_within(self, judged: Evaluated, budget_bytes: int) -> list[Evaluated]:
        """A way within the budget that is hardly slower than ``judged``, if changing a little leads to one."""
        events = self.context.events(tuning.JUST_WITHIN_EVENTS)
        path = reduce_peak(self.graph, self.costs, judged, target_bytes=budget_bytes, events=events)
        within = path[-1].peak_bytes <= budget_bytes
        slack_ms = tuning.STEP_GAP * self.costs.plain_step_ms
        return path[-1:] if within and path[-1].timeline.step_ms <= judged.timeline.step_ms + slack_ms else []

    def leanest(self) -> Evaluated:
        """The leanest choice out of a pool of its own: what is found must not depend on what came before."""
        choice = self.pool.afresh().leanest()
        return self.context.judge(choice.actions, choice.replays)
