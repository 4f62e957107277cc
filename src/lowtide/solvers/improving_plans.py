"""``improving_plans``: a good plan at once, and then the plan that ``solve`` would have found.

The first plan comes from columns that are rounded from relaxed pricing problems (``decomposition/master.py``), before
any program with whole decisions is solved; where the step is one model, from its rounded relaxation; near the least
peak, from the schedules of the chain methods and the search for that peak, as soon as it is low enough. The search goes
on from there, so waiting for the last plan costs no more than ``solve``. Nothing here looks at a clock: the same input
gives the same plans.

In large steps those columns may take seconds themselves (a loss that goes through its rows in a Python loop is one
segment of thousands of ops). There the best of the published methods comes before, after tenths of a second.

Known weakness: at the least peak itself the first plan comes after half of the time, because only the search for that
peak gets there.
"""

import time
from collections.abc import Iterator
from functools import partial

from lowtide.gc_control import gc_disabled
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.solvers import tuning
from lowtide.solvers.arguments import absolute_bytes, check_costs
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.exact import ExactSearch
from lowtide.solvers.search_context import SearchContext


def improving_plans(graph: StepGraph, costs: Costs, budget: int | str) -> Iterator[Plan]:
    """Yield plans within ``budget`` as they are found, each at least as fast as the one before.

    Args:
        budget: As for ``solve``.

    Yields:
        Mostly two: one without a bound after about a tenth of the time, and the plan of ``solve`` or a faster one. Of
        large steps three: a published method's comes first. Whoever needs no better plan stops asking.

    Raises:
        BudgetInfeasibleError: no plan is that small; ``least_bytes`` is what would do.
        ValueError: ``budget`` makes no sense, or ``costs`` belong to another graph.
        TypeError: ``budget`` is neither an int nor a string.
    """
    start_s = time.perf_counter()
    check_costs(graph, costs)
    budget_bytes = absolute_bytes(graph, costs, budget)
    context = SearchContext(graph, costs)
    planned = partial(build_plan, context, method="exact", budget_bytes=budget_bytes, start_s=start_s)
    with gc_disabled():
        search = ExactSearch(context)
        at_once = search.published_within(budget_bytes) if len(graph.events) >= tuning.PUBLISHED_FIRST_EVENTS else None
        plan = None if at_once is None else planned(at_once, bounded=False)
    if plan is not None:
        yield plan
    with gc_disabled():
        first = search.first(budget_bytes)
        is_new = first is not None and first != at_once
        plan = planned(first, bounded=False) if first is not None and is_new else None
    if plan is not None:
        yield plan
    with gc_disabled():
        found = [candidate for candidate in (search.within(budget_bytes), first) if candidate is not None]
        plan = planned(min(found, key=lambda c: context.simulated(c).timeline.step_ms), tighten=True)
    yield plan
