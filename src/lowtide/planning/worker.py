"""From a request to its answers: a plan of an earlier run, or a good plan at once and then the best one.

The planner's process and the thread that stands in for it run this same code, so both answer alike.
"""

from collections.abc import Iterator
from dataclasses import replace

from lowtide.errors import BudgetInfeasibleError, LowtideError, PlannerFailedError
from lowtide.plan import Plan
from lowtide.planning.plan_cache import CachedPlan, PlanCache
from lowtide.planning.plan_request import Answer, PlanRequest
from lowtide.solvers.dispatch import solve
from lowtide.solvers.improving_plans import improving_plans


def answers(request: PlanRequest) -> Iterator[Answer]:
    """What is found for ``request``, the final answer last. Raises nothing: an error is an answer.

    The final plan is what ``solve`` returns, or what it returned in an earlier run.
    """
    cache = None if request.cache_dir is None else PlanCache(request.cache_dir)
    found = CachedPlan(None) if cache is None else cache.find(request)
    if found.plan is not None:
        yield Answer(found.plan, cached=True)
        return
    if found.meanwhile is not None:
        yield Answer(found.meanwhile, final=False, cached=True)
    result: Plan | LowtideError | None = None
    try:
        for plan, final in _plans(request):
            result = plan
            if not final:
                yield Answer(plan, final=False)
    except BudgetInfeasibleError as error:
        result = error
    except Exception as error:
        result = PlannerFailedError(f"planning failed: {type(error).__name__}: {error}")
    assert result is not None
    if found.meanwhile is not None and isinstance(result, Plan):
        result = _faster(found.meanwhile, result)
    reasons = [found.reason]
    if cache is not None and isinstance(result, Plan):
        reasons.append(cache.keep(request, result))
    yield Answer(result, reason="; ".join(filter(None, reasons)))


def _faster(cached: Plan, solved: Plan) -> Plan:
    """A search that ends within its tolerance, or at a limit, may find less than an earlier one has."""
    if solved.predicted_step_ms <= cached.predicted_step_ms:
        return solved
    return replace(cached, bound_ms=solved.bound_ms, bound_model=solved.bound_model, status=solved.status)


def _plans(request: PlanRequest) -> Iterator[tuple[Plan, bool]]:
    """Plans, and whether each is the one of ``solve``."""
    if request.method == "exact" and request.budget is not None and not request.options and not request.offload:
        for plan in improving_plans(request.graph, request.costs, request.budget):
            yield plan, plan.bound_ms is not None  # a first plan has no bound
    else:
        yield solve(
            request.graph, request.costs, request.budget,
            method=request.method, offload=request.offload, **request.options,
        ), True  # fmt: skip
