"""One MILP for the whole step: first its rounded relaxation, then branch and bound where that is not near enough."""

import math
import time
from collections.abc import Iterator

import numpy as np

from lowtide.solvers import tuning
from lowtide.solvers.decomposition.segments import segments
from lowtide.solvers.graph_queries import complete_actions, ops_worth_replaying
from lowtide.solvers.local_search import descent
from lowtide.solvers.milp.coarsening import CoarseGraph
from lowtide.solvers.milp.highs import MilpResult, seconds_left
from lowtide.solvers.milp.peak_model import PeakModel
from lowtide.solvers.search_context import Evaluated, SearchContext, SearchResult


class MonolithicSearch:
    """The search by one model."""

    def __init__(self, context: SearchContext, coarse: CoarseGraph) -> None:
        self.context, self.coarse = context, coarse
        self._last: tuple[int, tuple[PeakModel, list[Evaluated], float]] | None = None  # by budget

    @classmethod
    def of(cls, context: SearchContext) -> "MonolithicSearch | None":
        """For a step that may be one model; None where too many of its ops are worth replaying."""
        if len(ops_worth_replaying(context.graph)) > tuning.MONOLITHIC_OPS:
            return None
        return cls(context, CoarseGraph(context, segments(context.graph)))

    def fastest(self, budget_bytes: int) -> SearchResult:
        """The faster of the rounded relaxation and, where that is not near enough to the bound, the MILP's answer."""
        model, rounded, bound_ms = self._rounded(budget_bytes)
        found = list(rounded)
        if found and self.context.within_tolerance(found[-1], bound_ms):
            return SearchResult(found[-1], True, bound_ms)
        answer = self._minimise(
            model, time.perf_counter() + self.context.limits.time_limit_s, nodes=self.context.limits.node_limit
        )
        if answer.status != "infeasible":
            bound_ms = self.context.floor_ms + max(answer.bound - model.objective_slack, 0.0) * model.ms_unit
        proven = answer.status == "optimal"
        if len(answer.values):
            best = self._chosen(model, answer.values)
            proven &= best.peak_bytes <= budget_bytes
            *_, last = descent(self.context, best, target_bytes=budget_bytes, events=tuning.ROUNDING_EVENTS)
            found.append(last)
        within = [e for e in found if e.peak_bytes <= budget_bytes]
        return SearchResult(min(within, key=lambda e: e.rank, default=None), proven, bound_ms)

    def first(self, budget_bytes: int) -> list[Evaluated]:
        """What is found before branch and bound, the best last; ``fastest`` goes on from there."""
        return self._rounded(budget_bytes)[1]

    def _rounded(self, budget_bytes: int) -> tuple[PeakModel, list[Evaluated], float]:
        """The model, candidates rounded from its relaxation, the best last, and the bound so far; looked for once."""
        if self._last is None or self._last[0] != budget_bytes:
            model = PeakModel(self.coarse, budget_bytes)
            found: list[Evaluated] = []
            bound_ms = self.context.floor_ms
            if not self.context.per_op:
                found, bound_ms = self._round_relaxation(model, budget_bytes)
            self._last = budget_bytes, (model, found, bound_ms)
        return self._last[1]

    def _round_relaxation(self, model: PeakModel, budget_bytes: int) -> tuple[list[Evaluated], float]:
        """Candidates rounded from the relaxation and brought within the budget; and the relaxation's bound."""
        relaxed = model.program.relax()
        if not math.isfinite(relaxed.objective):
            return [], self.context.floor_ms
        bound_ms = self.context.floor_ms + max(relaxed.objective - model.objective_slack, 0.0) * model.ms_unit
        max_ms = bound_ms + tuning.ROUNDING_MAX_EXCESS * self.context.costs.plain_step_ms
        found: list[Evaluated] = []
        for share in tuning.ROUNDING_THRESHOLDS:
            start, events = self._chosen(model, relaxed.values, share), tuning.ROUNDING_EVENTS
            *_, last = descent(self.context, start, target_bytes=budget_bytes, max_ms=max_ms, events=events)
            if last.peak_bytes <= budget_bytes:
                found.append(self.context.save_what_fits(last, budget_bytes))
                max_ms = min(max_ms, found[-1].timeline.step_ms)
            if found and self.context.within_tolerance(found[-1], bound_ms):
                break
        return sorted(found, key=lambda e: e.rank, reverse=True), bound_ms

    def min_peak(self) -> Evaluated | None:
        """The candidate with the least peak by the model; None if it finds nothing."""
        model = PeakModel(self.coarse, None)
        values = model.program.relax().values
        if self.coarse.size <= tuning.MIN_PEAK_MILP_SIZE:
            nodes = self.context.limits.node_limit if self.context.per_op else tuning.MIN_PEAK_NODES
            answer = self._minimise(model, math.inf, nodes=nodes)
            values = answer.values if len(answer.values) else values
        return self._chosen(model, values) if len(values) else None

    def rounded_min_peaks(self) -> Iterator[Evaluated]:
        """Where local search for the least peak may begin: what the relaxation finds, rounded in each way."""
        model = PeakModel(self.coarse, None)
        values = model.program.relax().values
        for share in tuning.ROUNDING_THRESHOLDS if len(values) else ():
            yield self._chosen(model, values, share)

    def lower_peak(self, evaluated: Evaluated) -> Evaluated:
        """The candidate with the least peak that is as fast as ``evaluated``; only on graphs modelled op by op."""
        if not self.context.per_op or evaluated.replays:
            return evaluated
        model = PeakModel(self.coarse, None, max_ms=evaluated.timeline.step_ms - self.context.floor_ms)
        deadline = time.perf_counter() + self.context.limits.time_limit_s
        answer = self._minimise(model, deadline, nodes=self.context.limits.node_limit)
        if not len(answer.values):
            return evaluated
        other = self._chosen(model, answer.values)
        # A faster one may need more than the budget: ``evaluated`` need not be the fastest candidate.
        return other if other.rank < evaluated.rank and other.peak_bytes <= evaluated.peak_bytes else evaluated

    def _chosen(self, model: PeakModel, values: np.ndarray, share: float = 0.5) -> Evaluated:
        """What ``values`` choose; ``share`` as for ``PeakModel.choice``."""
        return self.context.evaluate(complete_actions(self.context.graph, *model.choice(values, share)))

    def _minimise(self, model: PeakModel, deadline: float, *, nodes: int) -> MilpResult:
        gap, slack_ms = self.context.tolerances()
        return model.program.minimise(
            gap=gap,
            slack=slack_ms / model.ms_unit,
            node_limit=min(nodes, self.context.limits.node_limit),
            time_limit_s=seconds_left(deadline),
        )
