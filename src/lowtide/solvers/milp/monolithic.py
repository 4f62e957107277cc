"""One model for the whole step: a MILP chooses, the simulator judges, what it finds above the budget becomes a cut."""

from __future__ import annotations

import math
import time

import numpy as np

from lowtide.simulation.simulator import Timeline
from lowtide.solvers import tuning
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.local_search import Evaluated, reduce_peak
from lowtide.solvers.milp.coarsening import CoarseGraph
from lowtide.solvers.milp.highs import Answer, left_s
from lowtide.solvers.milp.peak_model import PeakModel
from lowtide.solvers.search_context import Found, SearchContext


class MonolithicSearch:
    """The search with one model."""

    def __init__(self, context: SearchContext, coarse: CoarseGraph) -> None:
        self.context, self.coarse = context, coarse
        self.graph, self.costs, self.limits = context.graph, context.costs, context.limits

    def fastest(self, budget_bytes: int) -> Found:
        """Solve, judge, cut, until the judge agrees."""
        model = PeakModel(self.coarse, budget_bytes)
        judged, bound_ms = ([], self.context.floor_ms) if self.context.fine else self._rounded(model, budget_bytes)
        if any(self.context.near_enough(j, bound_ms) for j in judged):
            return Found(judged, True, bound_ms)
        proven = True
        deadline = time.perf_counter() + self.limits.time_limit_s
        for round_ in range(tuning.CUT_ROUNDS):
            answer = self._minimise(model, deadline, nodes=self.limits.node_limit)
            if round_ == 0 and answer.status != "infeasible":
                bound_ms = self.context.floor_ms + max(answer.bound - model.objective_slack, 0.0) * model.ms_unit
            proven &= answer.status == "optimal"
            if not len(answer.values):
                break
            judged.append(self.context.judge(complete_actions(self.graph, *model.choice(answer.values))))
            if judged[-1].peak_bytes <= budget_bytes or time.perf_counter() > deadline:
                break
            # A moment that the model has not looked at yet is no loss; a corrected one may take better plans with it.
            proven &= self._cut(model, answer.values, judged[-1].timeline, budget_bytes)
        return Found(judged, proven, bound_ms)

    def _rounded(self, model: PeakModel, budget_bytes: int) -> tuple[list[Evaluated], float]:
        """What the relaxation rounds to, changed until it is within the budget; and the relaxation's bound."""
        relaxed = model.program.relax()
        if not math.isfinite(relaxed.objective):
            return [], self.context.floor_ms
        bound_ms = self.context.floor_ms + max(relaxed.objective - model.objective_slack, 0.0) * model.ms_unit
        found: list[Evaluated] = []
        for share in tuning.ROUNDING_THRESHOLDS:
            start = self.context.judge(complete_actions(self.graph, *model.choice(relaxed.values, share)))
            path = reduce_peak(
                self.graph,
                self.costs,
                start,
                target_bytes=budget_bytes,
                most_ms=min(
                    [
                        bound_ms + tuning.ROUNDING_MAX_EXCESS * self.costs.plain_step_ms,
                        *(j.timeline.step_ms for j in found),
                    ]
                ),
                events=self.context.events(tuning.ROUNDING_EVENTS),
            )
            if path[-1].peak_bytes <= budget_bytes:
                found.append(self.context.save_what_fits(path[-1], budget_bytes))
            if found and self.context.near_enough(found[-1], bound_ms):
                break
        return sorted(found, key=lambda j: j.rank, reverse=True), bound_ms

    def leanest(self) -> Evaluated | None:
        """What the model says that needs least; None if it finds nothing."""
        model = PeakModel(self.coarse, None)
        values = model.program.relax().values
        judged = [self.context.judge(complete_actions(self.graph, *model.choice(values)))] if len(values) else []
        for _ in range(tuning.CUT_ROUNDS if self.coarse.size <= tuning.MIN_PEAK_MILP_SIZE else 0):
            nodes = self.limits.node_limit if self.context.fine else tuning.MIN_PEAK_NODES
            answer = self._minimise(model, math.inf, nodes=nodes)
            if not len(answer.values):
                break
            judged.append(self.context.judge(complete_actions(self.graph, *model.choice(answer.values))))
            claimed_bytes = model.claimed_peak_bytes(answer.values)
            if judged[-1].peak_bytes <= claimed_bytes:
                break
            self._cut(model, answer.values, judged[-1].timeline, claimed_bytes)
        return judged[-1] if judged else None

    def lower_peak(self, judged: Evaluated) -> Evaluated:
        """Of all actions that are as fast the ones with the least peak; only on graphs that are modelled op by op."""
        if not self.context.fine or judged.replays:
            return judged
        model = PeakModel(self.coarse, None, most_ms=judged.timeline.step_ms - self.context.floor_ms)
        deadline = time.perf_counter() + self.limits.time_limit_s
        answer = self._minimise(model, deadline, nodes=self.limits.node_limit)
        if not len(answer.values):
            return judged
        other = self.context.judge(complete_actions(self.graph, *model.choice(answer.values)))
        # A faster one may need more than the budget: ``judged`` need not be the fastest there is.
        return other if other.rank < judged.rank and other.peak_bytes <= judged.peak_bytes else judged

    def _minimise(self, model: PeakModel, deadline: float, *, nodes: int) -> Answer:
        gap, slack_ms = self.context.tolerances()
        return model.program.minimise(
            gap=gap,
            slack=slack_ms / model.ms_unit,
            node_limit=min(nodes, self.limits.node_limit),
            time_limit_s=left_s(deadline),
        )

    def _cut(self, model: PeakModel, values: np.ndarray, timeline: Timeline, limit_bytes: int) -> bool:
        """Forbid the highest of the moments above ``limit_bytes``; return whether that cost no plan within it."""
        peaks = np.array(timeline.event_peak_bytes)
        above = np.flatnonzero(peaks > limit_bytes)
        above = above[np.argsort(-peaks[above], kind="stable")][: tuning.CUTS_PER_ROUND]
        replayed = {(r.event, r.peak_bytes): r.op for r in timeline.replays}
        lossless = True
        for event in above.tolist():
            peak = timeline.event_peak_bytes[event]
            lossless &= model.forbid(values, event, replayed.get((event, peak)), peak)
        return lossless
