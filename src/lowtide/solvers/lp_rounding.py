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

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE
from lowtide.solvers import tuning
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.local_search import Evaluated, evaluate, reduce_peak
from lowtide.solvers.lower_bound.relaxation import Relaxation
from lowtide.solvers.lower_bound.unavoidable import unavoidable


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
        model = Relaxation(unavoidable(graph), costs, budget_bytes, slots=slots)
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
        start = rounded(graph, costs, model, values, share)
        if start.peak_bytes <= most_bytes and start.actions not in seen:
            seen.append(start.actions)
            yield start


def rounded(graph: StepGraph, costs: Costs, model: Relaxation, values: np.ndarray, share: float = 0.5) -> Evaluated:
    """What ``values`` keep by ``share`` at least is kept; the rest is made again as often as they say."""
    dropped = [x for x, column in model.s.items() if values[column] < share and x in graph.stored]
    kept = [x for x, column in model.s.items() if values[column] >= share and x not in graph.stored]
    actions = complete_actions(graph, dropped, kept)
    times = {op: max(round(float(sum(values[column] for column in columns))), 1) for op, columns in model.N.items()}
    replays = {x: times[op] for op in times for x in graph.ops[op].makes if actions.get(x) == RECOMPUTE}
    return evaluate(graph, costs, actions, replays)


def violated_stages(
    graph: StepGraph, costs: Costs, model: Relaxation, values: np.ndarray, budget_bytes: int
) -> list[int]:
    """Stages without a slot in which what ``values`` say needs most memory above the budget; apart from each other."""
    unavoidable, ended = model.unavoidable, {stage for grid in model.grid.values() for stage in grid[:-1]}
    highest: dict[int, int] = {}
    for event, peak in enumerate(rounded(graph, costs, model, values).timeline.event_peak_bytes):
        stage = unavoidable.stage_of(event)
        if peak > budget_bytes and stage >= 0:
            highest[stage] = 0 if stage in ended else max(highest.get(stage, 0), peak)
    runs: list[list[int]] = []
    for stage in sorted(highest):
        if runs and stage - runs[-1][-1] <= tuning.STAGES_APART:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    tops = [top for top in (max(run, key=lambda t: highest[t]) for run in runs) if highest[top]]
    return sorted(tops, key=lambda t: -highest[t])[: tuning.SLOTS_PER_ROUND]
