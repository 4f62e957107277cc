"""The search for a deep step, segment by segment: single segments first, then runs of several, then local search."""

import math
import time
from dataclasses import replace

from lowtide.solvers import tuning
from lowtide.solvers.decomposition.master import ColumnChoice, ColumnGeneration
from lowtide.solvers.decomposition.multi_segment import MultiSegmentColumns
from lowtide.solvers.local_search import descent
from lowtide.solvers.lower_bound.bound import bound_time
from lowtide.solvers.lp_rounding import round_relaxation
from lowtide.solvers.search_context import Evaluated, SearchContext, SearchResult


class DecomposedSearch:
    """The search by column generation."""

    def __init__(self, context: SearchContext, columns: ColumnGeneration) -> None:
        self.context, self.columns = context, columns
        self.multi_segment = MultiSegmentColumns(columns.source, columns.runs)

    def fastest(self, budget_bytes: int) -> SearchResult:
        """The best plan by single segments; where it is far from the lower bound, also by runs of several."""
        result = self.by_single_segments(budget_bytes)
        if not self.context.limits.multi_segment:
            return result
        bound = bound_time(self.context, budget_bytes)
        enough_ms = bound.step_ms + tuning.NEAR_BOUND * self.context.costs.plain_step_ms
        # Infinite near the least peak: there only candidates that replay an op more than once may fit.
        if not enough_ms < result.best_ms < math.inf:
            return result

        runs = self._evaluated(self.choose_runs(budget_bytes, bound.ms_per_byte, self._deadline()), budget_bytes)
        result = min(result, runs, key=lambda found: found.best_ms)
        found: list[Evaluated] = []
        if result.best_ms > bound.step_ms + tuning.FAR_FROM_BOUND * self.context.costs.plain_step_ms:
            found = round_relaxation(self.context, budget_bytes, most_ms=result.best_ms, enough_ms=enough_ms)
        too_deep = tuning.BUDGETS_ABOVE_TRIES * len(self.context.graph.events) > tuning.BUDGETS_ABOVE_EVENTS
        if result.best_ms > enough_ms and not (found or too_deep):
            found = self._from_above(budget_bytes, bound.ms_per_byte, result.best_ms)
        return replace(result, best=found[-1]) if found else result

    def first(self, budget_bytes: int) -> list[Evaluated]:
        """The candidate that the first columns give, brought within the budget; empty where that fails."""
        self.columns.add_first(budget_bytes)
        activations = self.context.plain.peak_bytes - self.context.graph.start_bytes
        for share in (0.0, *tuning.BUDGETS_ABOVE):
            choice = self.columns.choose(budget_bytes + int(share * activations), self.columns.runs, 0.0)
            if choice is None:
                continue
            start, events = self.context.evaluate(choice.actions, choice.replays), tuning.FIRST_PLAN_EVENTS
            *_, last = descent(self.context, start, target_bytes=budget_bytes, events=events)
            if last.peak_bytes <= budget_bytes:
                return [last]
        return []

    def choose_runs(self, budget_bytes: int, ms_per_byte: float, deadline: float) -> ColumnChoice | None:
        """The fastest choice of columns of single segments and of runs; None where none fits.

        Args:
            ms_per_byte: Step time that one byte of budget saves.
        """
        longest_run = self.multi_segment.longest
        if not longest_run:
            return None
        self.multi_segment.price_pairs(ms_per_byte, self.columns.dual_prices, deadline)
        longest = min(tuning.FIRST_RUN_SEGMENTS, longest_run)
        while True:
            runs = [*self.columns.runs, *self.multi_segment.up_to(longest)]
            choice = self.columns.choose(budget_bytes, runs, 0.0)
            if choice is None or choice.longest < longest or longest == longest_run:
                return choice
            longest = min(2 * longest, longest_run)

    def _from_above(self, budget_bytes: int, ms_per_byte: float, max_ms: float) -> list[Evaluated]:
        """Candidates faster than ``max_ms``: choices for larger budgets, brought within this one by local search.

        Columns cover neither every way to run a segment nor replays across segments; local search may find both.
        """
        found: list[Evaluated] = []
        activations = self.context.plain.peak_bytes - self.context.graph.start_bytes
        for share in tuning.BUDGETS_ABOVE:
            choice = self.choose_runs(budget_bytes + int(share * activations), ms_per_byte, math.inf)
            if choice is None:
                continue
            start = self.context.evaluate(choice.actions, choice.replays)
            *_, last = descent(
                self.context, start, target_bytes=budget_bytes, max_ms=max_ms, least_ms_per_byte=ms_per_byte,
                events=tuning.BUDGETS_ABOVE_EVENTS,
            )  # fmt: skip
            if last.peak_bytes <= budget_bytes and last.timeline.step_ms < max_ms:
                found.append(last)
                max_ms = last.timeline.step_ms
        return found

    def by_single_segments(self, budget_bytes: int) -> SearchResult:
        """The best plan in which each segment runs by a column of its own."""
        slack_ms = self.context.tolerances()[1]
        return self._evaluated(self.columns.solve(budget_bytes, slack_ms, self._deadline()), budget_bytes)

    def _deadline(self) -> float:
        return time.perf_counter() + self.context.limits.time_limit_s

    def _evaluated(self, choice: ColumnChoice | None, budget_bytes: int) -> SearchResult:
        """``choice`` as a result, if the simulator agrees that it is within the budget."""
        bound_ms = self.context.floor_ms + (0.0 if choice is None else choice.bound_ms)
        best = None if choice is None else self.context.evaluate(choice.actions, choice.replays)
        if best is None or best.peak_bytes > budget_bytes:
            return SearchResult(None, False, bound_ms)
        return SearchResult(best, self.context.within_tolerance(best, bound_ms), bound_ms)

    def min_peak(self) -> Evaluated:
        """The choice with the least peak, from pools of its own: it must not depend on earlier searches."""
        choice = self.columns.with_empty_pools().min_peak_choice()
        return self.context.evaluate(choice.actions, choice.replays)
