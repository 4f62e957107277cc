"""What the exact method looks for: one step, its limits, the judge, and how near is near enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.solvers import tuning
from lowtide.solvers.graph_queries import birth_and_first_use, complete_actions
from lowtide.solvers.local_search import Evaluated, judge
from lowtide.solvers.lower_bound.bound import taped_plain_ms


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
        listed: Whether to look at what each published method has for the very budget; only steps that are not too large
            for it.
    """

    time_limit_s: float = tuning.TIME_LIMIT_S
    node_limit: int = tuning.NODE_LIMIT
    gap: float | None = None
    effort: float = 1.0
    longer: bool = True
    listed: bool = True


@dataclass(frozen=True)
class Found:
    """What was tried, the last one within the budget if any is; ``proven``: nothing in the model is faster."""

    judged: list[Evaluated]
    proven: bool
    bound_ms: float

    @property
    def best_ms(self) -> float:
        return self.judged[-1].timeline.step_ms if self.judged else 0.0

    def best_within(self, budget_bytes: int) -> float:
        return min((j.timeline.step_ms for j in self.judged if j.peak_bytes <= budget_bytes), default=math.inf)


class SearchContext:
    """The search for fast ways to run one step.

    Attributes:
        fine: Whether the step is modelled op by op.
        floor_ms: Step time beside replays: whatever is recomputed, the tape's watching of forward is paid in full.
    """

    def __init__(self, graph: StepGraph, costs: Costs, limits: Limits, *, fine: bool) -> None:
        self.graph, self.costs, self.limits, self.fine = graph, costs, limits, fine
        self.floor_ms = taped_plain_ms(graph, costs)
        self.plain = self.judge(complete_actions(graph, ()))

    def judge(self, actions: dict[int, str], replays: dict[int, int] | None = None) -> Evaluated:
        return judge(self.graph, self.costs, actions, replays)

    def events(self, most: int) -> int:
        """How many may be simulated, of ``most`` with all effort."""
        return int(self.limits.effort * most)

    def tolerances(self) -> tuple[float, float]:
        """Of the recompute time, and milliseconds."""
        gap = self.limits.gap
        if gap is None:
            gap = 0.0 if self.fine else tuning.GAP
        # What is paid for is the step: near its bound in those terms, proving more only costs time.
        slack_ms = 0.0 if self.fine or self.limits.gap is not None else tuning.STEP_GAP * self.costs.plain_step_ms
        return gap, slack_ms

    def near_enough(self, judged: Evaluated, bound_ms: float) -> bool:
        gap, slack_ms = self.tolerances()
        ms = judged.timeline.step_ms
        return ms - bound_ms <= max(slack_ms, gap * (ms - self.floor_ms))

    def save_what_fits(self, judged: Evaluated, budget_bytes: int) -> Evaluated:
        """Save every storage whose replay the budget does not need, the dearest first."""
        graph, ops = self.graph, self.costs.op_ms
        dropped = [s for s, action in judged.actions.items() if action == RECOMPUTE and s in graph.stored]
        kept = [s for s, action in judged.actions.items() if action == SAVE and s not in graph.stored]
        made, asked = birth_and_first_use(graph)
        dropped.sort(key=lambda s: (-ops[graph.storages[s].op or 0], s))
        tries = self.events(tuning.SAVE_WHAT_FITS_EVENTS) // max(len(graph.events), 1)
        peaks = np.array(judged.timeline.event_peak_bytes)
        for storage in list(dropped):
            if tries == 0:
                break
            room = budget_bytes - int(peaks[made[storage] : asked.get(storage)].max(initial=0))
            if room < graph.storages[storage].bytes:
                continue
            tries -= 1
            fewer = [s for s in dropped if s != storage]
            trial = self.judge(complete_actions(graph, fewer, kept), judged.replays)
            if trial.peak_bytes <= budget_bytes and trial.rank <= judged.rank:
                judged, dropped, peaks = trial, fewer, np.array(trial.timeline.event_peak_bytes)
        return judged
