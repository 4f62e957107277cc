"""Rounds a solution of the relaxation to whole decisions, and finds the stages where these exceed the budget unseen."""

import numpy as np

from lowtide.plan import RECOMPUTE
from lowtide.solvers import tuning
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.lower_bound.columns import Columns


def rounded(model: Columns, values: np.ndarray, share: float = 0.5) -> tuple[dict[int, str], dict[int, int]]:
    """Actions by storage, and how often each recomputed storage is made again.

    What ``values`` save by ``share`` at least is saved; the rest is recomputed as often as they say.
    """
    graph = model.graph
    dropped = [x for x, column in model.s.items() if values[column] < share and x in graph.stored]
    kept = [x for x, column in model.s.items() if values[column] >= share and x not in graph.stored]
    actions = complete_actions(graph, dropped, kept)
    times = {op: max(round(float(sum(values[column] for column in columns))), 1) for op, columns in model.N.items()}
    return actions, {x: times[op] for op in times for x in graph.ops[op].makes if actions.get(x) == RECOMPUTE}


def violated_stages(model: Columns, values: np.ndarray, budget_bytes: int) -> list[int]:
    """Stages without a slot in which ``values``, rounded, need most memory above the budget; apart from each other."""
    unavoidable, with_slot = model.unavoidable, {stage for grid in model.grid.values() for stage in grid[:-1]}
    highest: dict[int, int] = {}
    timeline = model.context.evaluate(*rounded(model, values)).timeline
    for event, peak in enumerate(timeline.event_peak_bytes):
        stage = unavoidable.stage_of(event)
        if peak > budget_bytes and stage >= 0:
            highest[stage] = 0 if stage in with_slot else max(highest.get(stage, 0), peak)
    runs: list[list[int]] = []
    for stage in sorted(highest):
        if not runs or stage - runs[-1][-1] > tuning.STAGES_APART:
            runs.append([])
        runs[-1].append(stage)
    tops = [top for top in (max(run, key=lambda t: highest[t]) for run in runs) if highest[top]]
    return sorted(tops, key=lambda t: -highest[t])[: tuning.SLOTS_PER_ROUND]
