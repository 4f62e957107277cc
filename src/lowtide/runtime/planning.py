"""From a request to its answers: a plan of an earlier run, or a quick plan and then the best one.

The planner's process and the thread that stands in for it run this same code, so both answer alike.
"""

from collections.abc import Iterator

from lowtide.errors import BudgetInfeasibleError, LowtideError, PlannerFailedError
from lowtide.plan import Plan
from lowtide.runtime.plan_cache import CachedPlan, PlanCache
from lowtide.runtime.plan_request import Answer, PlanRequest
from lowtide.solvers.arguments import absolute_bytes
from lowtide.solvers.dispatch import solve
from lowtide.solvers.quick_plan import quick_plan


def answers(request: PlanRequest) -> Iterator[Answer]:
    """What is found for ``request``, the final answer last. Raises nothing: an error is an answer.

    The final plan is what ``solve`` returns, or what it returned in an earlier run.
    """
    cache = None if request.cache_dir is None else PlanCache(request.cache_dir)
    found = CachedPlan(None) if cache is None else cache.find(request)
    if found.plan is not None:
        yield Answer(found.plan, cached=True)
        return
    if request.method == "exact" and (quick := _quick(request)) is not None:
        yield Answer(quick, final=False)
    result = _solved(request)
    reasons = [found.reason]
    if cache is not None and isinstance(result, Plan):
        reasons.append(cache.keep(request, result))
    yield Answer(result, reason="; ".join(filter(None, reasons)))


def _quick(request: PlanRequest) -> Plan | None:
    """A plan of a published method, to be used until the search is done; None where there is none."""
    try:
        budget_bytes = absolute_bytes(request.graph, request.costs, request.budget or 0)
        return quick_plan(request.graph, request.costs, budget_bytes)
    except Exception:  # whatever is wrong with the request, ``solve`` says it
        return None


def _solved(request: PlanRequest) -> Plan | LowtideError:
    """The plan, or the error that ``solve`` raises; of another type than lowtide's own: ``PlannerFailedError``."""
    try:
        return solve(
            request.graph, request.costs, request.budget,
            method=request.method, offload=request.offload, **request.options,
        )  # fmt: skip
    except BudgetInfeasibleError as error:
        return error
    except Exception as error:
        return PlannerFailedError(f"planning failed: {type(error).__name__}: {error}")
