"""Plans for one budget that the bound's relaxation points to: what it keeps and replays, rounded, then local search.

The relaxation (``relaxation.py``) knows replays of any reach and number, which segments planned apart and models that
replay once do not, but counts memory only where it has a slot. So, as in ``tighten_bound.py``: round, let the
simulator say
which stages need most memory above the budget, and relax again with slots for those. Every start is brought within the
budget by ``local_search.py``; the simulator judges.

A bound that were wrong would not be found out by these plans, so they stand beside those of ``exact.py``'s own models.

Known weaknesses: starts far above the budget are left alone, where local search finds nothing, or nothing fast; and it
is for small steps only, where a simulation and a relaxation take little.
"""

import math
from collections.abc import Iterator

import numpy as np

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.solvers import tuning
from lowtide.solvers.local_search import Evaluated, evaluate, reduce_peak
from lowtide.solvers.lower_bound.relaxation import Relaxation
from lowtide.solvers.lower_bound.rounding import rounded, violated_stages


def round_relaxation(
    graph: StepGraph, costs: Costs, budget_bytes: int, *, most_ms: float, enough_ms: float, events: int
) -> list[Evaluated]:
    """Ways within ``budget_bytes``, each faster than the one before.

    Args:
        most_ms: Slower ways are of no use.
        enough_ms: None needs to be faster.
        events: How many events may be simulated to bring one start within the budget.
    """
    found: list[Evaluated] = []
    slots: set[int] = set()
    for _ in range(tuning.LP_ROUNDING_ROUNDS if len(graph.ops) <= tuning.LP_ROUNDING_OPS else 0):
        model = Relaxation(graph, costs, budget_bytes, slots=slots)
        relaxed = model.program.relax()
        if not math.isfinite(relaxed.objective):
            break
        for start in _starts(graph, costs, model, relaxed.values, budget_bytes):
            path = reduce_peak(graph, costs, start, target_bytes=budget_bytes, max_ms=most_ms, events=events)
            if path[-1].peak_bytes <= budget_bytes and path[-1].timeline.step_ms < most_ms:
                found.append(path[-1])
                most_ms = path[-1].timeline.step_ms
        more = violated_stages(graph, costs, model, relaxed.values, budget_bytes)
        if most_ms <= enough_ms or not more:
            break
        slots.update(more)
    return found


def _starts(
    graph: StepGraph, costs: Costs, model: Relaxation, values: np.ndarray, budget_bytes: int
) -> Iterator[Evaluated]:
    most_bytes = budget_bytes + tuning.LP_ROUNDING_MAX_EXCESS * (budget_bytes - graph.resident_bytes)
    seen: list[dict[int, str]] = []
    for share in tuning.LP_ROUNDING_THRESHOLDS:
        start = evaluate(graph, costs, *rounded(graph, model, values, share))
        if start.peak_bytes <= most_bytes and start.actions not in seen:
            seen.append(start.actions)
            yield start
