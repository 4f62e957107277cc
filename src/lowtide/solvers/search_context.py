"""State shared by the search stages: graph, costs, limits, tolerance, evaluation."""

import math
from dataclasses import dataclass

import numpy as np

from lowtide.graph.costs import Costs
from lowtide.graph.facts import step_facts
from lowtide.graph.step_graph import StepGraph
from lowtide.solvers import tuning
from lowtide.solvers.graph_queries import choices, complete_actions, taped_plain_ms
from lowtide.solvers.local_search import Evaluated, evaluate


@dataclass(frozen=True)
class Limits:
    """How long to search.

    Attributes:
        time_limit_s: Of each stage of the search for the fastest plan; a safety net, because what a clock cuts off
            differs from run to run. The search for the least peak is limited by counts alone.
        node_limit: Branch-and-bound nodes of one MILP.
        gap: Relative to the recompute time; None: 0 on tiny graphs, 1 % on others.
        multi_segment: Whether to try runs of several segments where single segments leave a plan far from the bound.
    """

    time_limit_s: float = tuning.TIME_LIMIT_S
    node_limit: int = tuning.NODE_LIMIT
    gap: float | None = None
    multi_segment: bool = True


@dataclass(frozen=True)
class SearchResult:
    """What one search found."""

    best: Evaluated | None  # the fastest candidate within the budget; None where none was found
    proven: bool  # the model has no faster candidate, within the tolerance
    bound_ms: float  # no candidate of the model has a shorter step

    @property
    def best_ms(self) -> float:
        """Step time of ``best``; infinite where there is none."""
        return math.inf if self.best is None else self.best.timeline.step_ms


class SearchContext:
    """One step, the limits of its search, and how to evaluate a candidate.

    Attributes:
        per_op: Whether the step is modelled op by op.
        plain: The step that saves everything.
        floor_ms: Step time without replays: whatever is recomputed, the tape watches all of forward.
    """

    def __init__(self, graph: StepGraph, costs: Costs, limits: Limits, *, per_op: bool) -> None:
        self.graph, self.costs, self.limits, self.per_op = graph, costs, limits, per_op
        self.floor_ms = taped_plain_ms(graph, costs)
        self.plain = self.evaluate(complete_actions(graph, ()))

    def evaluate(self, actions: dict[int, str], replays: dict[int, int] | None = None) -> Evaluated:
        return evaluate(self.graph, self.costs, actions, replays)

    def tolerances(self) -> tuple[float, float]:
        """The gap at which a search may stop: relative to the recompute time, and in milliseconds."""
        gap = self.limits.gap
        if gap is None:
            gap = 0.0 if self.per_op else tuning.GAP
        # Users pay for the step: once its time is near the bound, proving more only costs time.
        slack_ms = 0.0 if self.per_op or self.limits.gap is not None else tuning.STEP_GAP * self.costs.plain_step_ms
        return gap, slack_ms

    def within_tolerance(self, evaluated: Evaluated, bound_ms: float) -> bool:
        gap, slack_ms = self.tolerances()
        ms = evaluated.timeline.step_ms
        return ms - bound_ms <= max(slack_ms, gap * (ms - self.floor_ms))

    def save_what_fits(self, evaluated: Evaluated, budget_bytes: int) -> Evaluated:
        """``evaluated`` with every storage saved that the budget has room for, the dearest replay first."""
        graph, ops = self.graph, self.costs.op_ms
        dropped, kept = choices(graph, evaluated.actions)
        facts = step_facts(graph)
        dropped.sort(key=lambda s: (-ops[graph.storages[s].op or 0], s))
        tries = tuning.SAVE_WHAT_FITS_EVENTS // max(len(graph.events), 1)
        peaks = np.array(evaluated.timeline.event_peak_bytes)
        for storage in list(dropped):
            if tries == 0:
                break
            room = budget_bytes - int(peaks[facts.birth[storage] : facts.first_use.get(storage)].max(initial=0))
            if room < graph.storages[storage].bytes:
                continue
            tries -= 1
            fewer = [s for s in dropped if s != storage]
            trial = self.evaluate(complete_actions(graph, fewer, kept), evaluated.replays)
            if trial.peak_bytes <= budget_bytes and trial.rank <= evaluated.rank:
                evaluated, dropped, peaks = trial, fewer, np.array(trial.timeline.event_peak_bytes)
        return evaluated
