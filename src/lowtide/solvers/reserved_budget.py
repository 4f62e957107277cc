"""Plans whose peak fits the budget as the device's allocator counts it: solved again for less until one does.

A solver counts the bytes that ops ask for. The allocator counts whole blocks, and reserves whole segments; how much
that adds is known only once there is a plan to simulate.

- ``within_reserved``, for a budget of reserved bytes: solve for the whole budget, then for less by what the plan
  reserved too much, until one fits; then, by halves, for budgets between the two. If none fits, take the plan with the
  least peak.
- ``within_counted``, for a budget of allocated bytes: solve for less by what the device counts too much, a few times.
  If no plan fits as the device counts, return the one that fits as the solver counts; reports give both numbers.

Known weakness: a plan that allocates more may reserve less, so a faster plan that fits may be missed.
"""

from collections.abc import Callable
from dataclasses import replace

from lowtide.errors import BudgetInfeasibleError
from lowtide.simulation.allocator_peaks import why_unknown
from lowtide.simulation.simulator import Timeline
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.search_context import SearchContext
from lowtide.units import format_bytes

_ROUNDS = 8
_COUNTED_ROUNDS = 3
_LEAST_LOWERED_BY = 1 / 64  # of what the step makes: what is reserved comes in whole segments


def within_reserved(context: SearchContext, budget_bytes: int, within: Callable[[int], Candidate]) -> Candidate:
    """A plan that reserves no more than ``budget_bytes``, the fastest of those that were tried.

    Args:
        within: Finds the fastest plan for so many allocated bytes, or raises ``BudgetInfeasibleError``.

    Raises:
        BudgetInfeasibleError: none does, the plan with the least allocated peak included; all its bytes are reserved.
    """
    start_bytes = context.graph.start_bytes
    best: tuple[float, Candidate] | None = None
    limit_bytes, fits_bytes, fails_bytes = budget_bytes, 0, budget_bytes + 1
    for _ in range(_ROUNDS):
        try:
            candidate = within(limit_bytes)
        except BudgetInfeasibleError:
            break
        timeline = context.simulated(candidate).timeline
        over_bytes = _reserved(timeline) - budget_bytes
        smallest_step = max(1, int(_LEAST_LOWERED_BY * (timeline.peak_bytes - start_bytes)))
        if over_bytes <= 0:
            fits_bytes = limit_bytes
            if best is None or timeline.step_ms < best[0]:
                best = timeline.step_ms, candidate
        else:
            fails_bytes = min(fails_bytes, timeline.peak_bytes)
        if best is None:
            limit_bytes = timeline.peak_bytes - max(over_bytes, smallest_step)
        elif fails_bytes - fits_bytes <= smallest_step:
            break
        else:
            limit_bytes = (fits_bytes + fails_bytes) // 2
    if best is not None:
        return best[1]
    try:
        leanest, proven_bytes = within(start_bytes), 0
    except BudgetInfeasibleError as error:
        leanest, proven_bytes = within(error.least_bytes), error.proven_bytes
    timeline = context.simulated(leanest).timeline
    least_bytes = _reserved(timeline)
    if least_bytes <= budget_bytes:
        return leanest
    raise BudgetInfeasibleError(
        f"no plan found fits budget={format_bytes(budget_bytes)} of reserved memory: the leanest reserves "
        f"{format_bytes(least_bytes)} ({least_bytes} bytes).\n"
        f"  allocated at its peak    {format_bytes(timeline.peak_bytes)}\n"
        f"  in segments not full     {format_bytes(least_bytes - timeline.peak_bytes)}\n"
        f"Raise the budget to {least_bytes} bytes or more, reduce the batch, or let segments grow: "
        "PYTORCH_ALLOC_CONF=expandable_segments:True.",
        budget_bytes=budget_bytes,
        least_bytes=least_bytes,
        proven_bytes=proven_bytes,
    )


def within_counted(context: SearchContext, budget_bytes: int, within: Callable[[int], Candidate]) -> Candidate:
    """A plan of which the device counts no more than ``budget_bytes`` allocated; else the fastest by bytes asked for.

    Args:
        within: As for ``within_reserved``.

    Raises:
        BudgetInfeasibleError: no plan has so few bytes.
    """
    fastest = candidate = within(budget_bytes)
    if why_unknown(context.graph.device):
        return fastest
    limit_bytes = budget_bytes
    for _ in range(_COUNTED_ROUNDS):
        timeline = context.simulated(candidate).timeline
        over_bytes = (timeline.counted_peak_bytes or 0) - budget_bytes
        if over_bytes <= 0:
            return candidate
        limit_bytes = min(limit_bytes, timeline.peak_bytes) - over_bytes
        try:
            candidate = within(limit_bytes)
        except BudgetInfeasibleError:
            return fastest
        if candidate.status == "optimal":  # for fewer bytes than there are
            candidate = replace(candidate, status="feasible")
    counted = context.simulated(candidate).timeline.counted_peak_bytes or 0
    return candidate if counted <= budget_bytes else fastest


def _reserved(timeline: Timeline) -> int:
    assert timeline.reserved_peak_bytes is not None  # the budget's kind was checked
    return timeline.reserved_peak_bytes
