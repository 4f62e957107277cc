"""``solve``: a graph, its costs and a budget in, a plan out, whatever the method."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lowtide.errors import BudgetInfeasibleError
from lowtide.gc_control import gc_disabled
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.options import did_you_mean
from lowtide.plan import ALLOCATED, RESERVED, Plan
from lowtide.solvers.arguments import TierLimits, absolute_bytes, check_budget_kind, check_costs, offload_capacities
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.exact import ExactSearch
from lowtide.solvers.infeasible import infeasible_error, residents_error
from lowtide.solvers.offload.search import exact_search
from lowtide.solvers.published.lazy_candidates import fastest_within, least_peak
from lowtide.solvers.published.methods import BUDGETED, PUBLISHED, lazy_candidates
from lowtide.solvers.reserved_budget import within_counted, within_reserved
from lowtide.solvers.search_context import Limits, SearchContext

METHODS = ("exact", *PUBLISHED)
_USERS = {"n": ("every_n", "revolve"), "ratio": ("knapsack",)}  # methods that take an option
_USERS |= dict.fromkeys(("gap", "time_limit_s", "node_limit", "offload", "effort"), ("exact",))
FULL, FIRST = EFFORTS = "full", "first"


def check_method(method: str, options: Mapping[str, Any]) -> None:
    """Refuse an unknown method, and options that the method does not take.

    Args:
        options: Those that were given, by name.

    Raises:
        ValueError: with the nearest name, or what takes the option.
    """
    if method not in METHODS:
        raise ValueError(
            f"method={method!r} is not known.{did_you_mean(str(method), METHODS)} Use one of {', '.join(METHODS)}."
        )
    for name, value in options.items():
        if method not in _USERS[name]:
            instead = " or ".join(f'"{user}"' for user in _USERS[name])
            raise ValueError(
                f"{name}={value!r} has no meaning for method={method!r}. Leave it out, or use method={instead}."
            )


def solve(
    graph: StepGraph,
    costs: Costs,
    budget: int | str | None = None,
    *,
    budget_kind: str = ALLOCATED,
    method: str = "exact",
    n: int | None = None,
    ratio: float | None = None,
    time_limit_s: float = Limits.time_limit_s,
    node_limit: int = Limits.node_limit,
    gap: float | None = Limits.gap,
    offload: TierLimits = (),
    effort: str = FULL,
) -> Plan:
    """Decide for every stored storage whether to save, recompute or move it, so that the step fits and is fastest.

    Args:
        budget: Peak allocated bytes (an int, or ``"6GiB"``), or ``"40%"`` of the plain step's activation memory.
            ``none`` to ``selective`` decide without one; given one, they are held to it.
        budget_kind: ``"reserved"``: the budget is of what the device's caching allocator reserves, as the device's own
            tools show it (``Timeline.reserved_peak_bytes``), not of what is allocated.
        method: ``exact``, or a published method, evaluated by the same simulator: ``none``, ``full``, ``every_n``,
            ``sqrt_n``, ``selective``, or one that plans for a budget: ``revolve``, ``rotor``, ``knapsack``.
        n: For ``every_n``: every how many layers (default 2). For ``revolve``: layer inputs held at a time (default:
            whatever number is fastest within the budget).
        ratio: For ``knapsack``: share of the stored bytes that may stay, 0 to 1 (default: whatever share is fastest).
        time_limit_s: A safety net; a search that it ends may differ from run to run.
        node_limit: Branch-and-bound nodes of one solve: the limit that keeps results reproducible.
        offload: Tiers that storages may be moved to (``host``, ``disk``), or how much of each may be used:
            ``{"disk": "20GiB"}``, None for any amount. ``costs`` has to know their links. For ``exact`` only.
        gap: Tolerated excess of the recompute time over the bound; by default 0 on tiny graphs and 1 % on others.
        effort: ``first``: the first good plan, in about a tenth of the time and without a bound. Near the least peak,
            where that takes longest, it is not looked for. For ``exact`` only, without ``offload``.

    Returns:
        A plan whose simulated peak, of the kind that the budget is stated in, is within the budget.

    Raises:
        BudgetInfeasibleError: the method has no plan that small; ``least_bytes`` is what would do.
        ValueError: ``budget``, ``budget_kind``, ``method``, ``n``, ``ratio``, ``offload`` or ``effort`` makes no
            sense, or ``method`` needs repeated layers and there are none.
        TypeError: ``budget`` is neither an int nor a string.
    """
    start_s = time.perf_counter()
    if effort not in EFFORTS:
        raise ValueError(f"effort={effort!r} is not known. Use {FULL!r} or {FIRST!r}.")
    if effort == FIRST and offload:
        raise ValueError(f"effort={effort!r} has no meaning with offload={offload!r}. Leave one of them out.")
    given = {"n": n, "ratio": ratio, "offload": offload or None, "effort": None if effort == FULL else effort}
    check_method(method, {name: value for name, value in given.items() if value is not None})
    capacities = offload_capacities(costs, offload)
    check_costs(graph, costs)
    check_budget_kind(budget, budget_kind, graph.device)
    budget_bytes = None if budget is None else absolute_bytes(graph, costs, budget)
    if budget_bytes is None and (method == "exact" or (method in BUDGETED and n is None and ratio is None)):
        option = BUDGETED.get(method)
        instead = f", or {option}=" if option else ""
        raise ValueError(f'budget=None: method="{method}" needs one. Pass bytes, "6GiB" or "40%"{instead}.')

    context = SearchContext(graph, costs, Limits(time_limit_s, node_limit, gap))

    def plan() -> Plan:
        with gc_disabled():  # many small objects and hardly a cycle: looking for them was a tenth of the time
            within = _first_plans(context) if effort == FIRST else _best_plans(context, method, n, ratio, capacities)
            if budget_kind == RESERVED:
                assert budget_bytes is not None
                candidate = within_reserved(context, budget_bytes, within)
            elif budget_bytes is not None and effort == FULL:
                candidate = within_counted(context, budget_bytes, within)
            else:
                candidate = within(budget_bytes)
            return build_plan(
                context, candidate, method=method, budget_bytes=budget_bytes, budget_kind=budget_kind, start_s=start_s,
                tighten=method == "exact", bounded=effort == FULL,
            )  # fmt: skip

    if budget_bytes is not None and budget_bytes < graph.resident_bytes:
        raise residents_error(graph, budget_bytes, partial(_error_of, plan))
    return plan()


def _error_of(search: Callable[[], Plan]) -> BudgetInfeasibleError:
    """What ``search`` raises, which finds nothing."""
    try:
        search()
    except BudgetInfeasibleError as error:
        return error
    raise AssertionError("a plan below what lives through the whole step")


def _first_plans(context: SearchContext) -> Callable[[Any], Candidate]:
    """By allocated bytes: the first good plan."""
    search = ExactSearch(context)

    def within(budget_bytes: int) -> Candidate:
        found = search.first(budget_bytes, near_least=False)
        if found is None:
            leanest = Candidate(min(search.published, key=lambda e: e.peak_bytes).actions)
            raise infeasible_error(context, budget_bytes, leanest, method="exact", way_out='use effort="full"')
        return found

    return within


def _best_plans(
    context: SearchContext, method: str, n: int | None, ratio: float | None, capacities: Mapping[str, int | None]
) -> Callable[[Any], Candidate]:
    """By allocated bytes, or None for any number: the fastest plan of the method."""
    if method == "exact":
        return exact_search(context, capacities).within
    known = lazy_candidates(context, method, n=n, ratio=ratio)

    def within(budget_bytes: int | None) -> Candidate:
        found = fastest_within(context, known, budget_bytes)
        if found is None:
            least = least_peak(context, known)
            assert least is not None and budget_bytes is not None
            raise infeasible_error(context, budget_bytes, least, method=method)
        return found

    return within
