"""The whole trade-off: the fastest plan at each of several peaks, from the least there is to the plain step."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan, in_notebook
from lowtide.solvers.arguments import TierLimits, offload_capacities
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.offload.search import exact_search
from lowtide.solvers.search_context import Limits, SearchContext


@dataclass(frozen=True)
class FrontierPoint:
    """One plan of the trade-off.

    Attributes:
        peak_bytes: Absolute allocated peak, by the simulator.
        step_ms: Forward and backward, replays included.
        plan: What to apply.
    """

    peak_bytes: int
    step_ms: float
    plan: Plan = field(repr=False)


class Frontier(list[FrontierPoint]):
    """Points by rising peak: a list that a notebook draws."""

    def _repr_html_(self) -> str:
        return in_notebook("frontier_html", self)


def frontier(
    graph: StepGraph,
    costs: Costs,
    *,
    points: int = 16,
    offload: TierLimits = (),
    progress: Callable[[int, int], None] | None = None,
) -> Frontier:
    """Plan the step for budgets from the least peak that is found to the plain step's, closer where memory is short.

    Args:
        points: How many budgets are asked for; what another point beats in both time and peak is left out.
        offload: As for ``solve``: then the points are of plans that may move storages.
        progress: Called with budgets done and budgets in all.

    Returns:
        Points by rising peak; step time falls from each to the next. The first has the least peak, the last recomputes
        nothing. A notebook draws the list.

    Raises:
        ValueError: ``points`` is below 2, or ``offload`` makes no sense.
    """
    if points < 2:
        raise ValueError(f"points={points}: a trade-off has two ends. Ask for 2 or more.")
    capacities = offload_capacities(costs, offload)
    # Many points, so each of them quickly: ``solve`` may find a little more at one.
    context = SearchContext(graph, costs, Limits(multi_segment=False))
    search = exact_search(context, capacities)
    least, most = graph.resident_bytes, context.plain.peak_bytes
    try:
        search.within(least)
    except BudgetInfeasibleError as error:
        least = error.least_bytes
    # Time rises steeply towards the least peak: squares put half of the points into the lower quarter.
    budgets = sorted({least + (most - least) * i**2 // (points - 1) ** 2 for i in range(points)})
    found: list[Plan] = []
    for done, budget in enumerate(budgets, start=1):
        start_s = time.perf_counter()
        candidate = search.within(budget)
        found.append(build_plan(context, candidate, method="exact", budget_bytes=budget, start_s=start_s))
        if progress is not None:
            progress(done, len(budgets))
    # A plan for less memory that happens to be faster serves the larger budget as well.
    found.sort(key=lambda plan: (plan.predicted_peak_bytes, plan.predicted_step_ms))
    front = Frontier()
    for plan in found:
        if not front or plan.predicted_step_ms < front[-1].step_ms:
            front.append(FrontierPoint(plan.predicted_peak_bytes, plan.predicted_step_ms, plan))
    return front
