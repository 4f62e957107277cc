"""Plans for one budget that the bound's relaxation points to: what it keeps and replays, rounded, then local search.

The relaxation (``relaxation.py``) knows replays of any reach and number, but counts memory only where it has a slot.
So, as in ``tighten_bound.py``: round, let the simulator say which stages need most memory above the budget, and relax
again with slots for those. Local search brings every start within the budget.

Known weaknesses: starts far above the budget are skipped, because local search from there fails or ends in a slow plan.
Steps of more than ``LP_ROUNDING_OPS`` ops are skipped too: to relax and simulate them takes too long.
"""

import math

from lowtide.solvers import tuning
from lowtide.solvers.local_search import descent
from lowtide.solvers.lower_bound.relaxation import Relaxation
from lowtide.solvers.lower_bound.rounding import rounded, violated_stages
from lowtide.solvers.search_context import Evaluated, SearchContext


def round_relaxation(context: SearchContext, budget_bytes: int, *, most_ms: float, enough_ms: float) -> list[Evaluated]:
    """Ways within ``budget_bytes``, each faster than the one before.

    Args:
        most_ms: Slower ways are of no use.
        enough_ms: None needs to be faster.
    """
    graph = context.graph
    found: list[Evaluated] = []
    slots: set[int] = set()
    most_bytes = budget_bytes + tuning.LP_ROUNDING_MAX_EXCESS * (budget_bytes - graph.start_bytes)
    for _ in range(tuning.LP_ROUNDING_ROUNDS if len(graph.ops) <= tuning.LP_ROUNDING_OPS else 0):
        model = Relaxation(context, budget_bytes, slots=slots)
        relaxed = model.program.relax()
        if not math.isfinite(relaxed.objective):
            break
        seen: list[dict[int, str]] = []
        for share in tuning.LP_ROUNDING_THRESHOLDS:
            start = context.evaluate(*rounded(model, relaxed.values, share))
            if start.peak_bytes > most_bytes or start.actions in seen:
                continue
            seen.append(start.actions)
            *_, last = descent(
                context, start, target_bytes=budget_bytes, max_ms=most_ms, events=tuning.LP_ROUNDING_EVENTS
            )
            if last.peak_bytes <= budget_bytes and last.timeline.step_ms < most_ms:
                found.append(last)
                most_ms = last.timeline.step_ms
        more = violated_stages(model, relaxed.values, budget_bytes)
        if most_ms <= enough_ms or not more:
            break
        slots.update(more)
    return found
