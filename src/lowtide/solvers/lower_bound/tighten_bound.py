"""A tighter bound for one budget: the relaxation of ``bound.py`` with whole decisions, and slots where they matter.

``bound.py`` is weak where storages are few and large: half of one may be saved, and a replayed storage only counts at
the end of a slot, of which an op has two. Here branch and bound keeps decisions whole, and slots are added where the
solution violates what was left out. After Boland, Hewitt, Marshall and Savelsbergh 2017, "The continuous-time service
network design problem", Operations Research 65(5): solve with few slots, add slots where the answer breaks, repeat.

It looks for a proof, which takes less time than an optimum: that no values satisfy the rows and are faster than the
known plan by ``TIGHT_GAP``. Every plan satisfies each row, however many slots there are, so every program on the way
proves a bound.

Known weaknesses: only for small programs, and only where the plan is within ``TIGHTEN_MAX_GAP`` of the bound, which it
is not near the least peak. The bound depends on the known plan, and may rise with the budget by less than that gap.
"""

import math
from dataclasses import replace
from itertools import chain

from lowtide.solvers import tuning
from lowtide.solvers.lower_bound.bound import Bound
from lowtide.solvers.lower_bound.relaxation import Relaxation
from lowtide.solvers.lower_bound.rounding import violated_stages
from lowtide.solvers.search_context import SearchContext


def tighten_bound(context: SearchContext, budget_bytes: int, known_ms: float, bound: Bound) -> Bound:
    """Return a bound that proves the known plan nearly the fastest, or the tightest that was found.

    Args:
        known_ms: Step time of a plan within the budget.
        bound: Result of ``bound_time``; its ``ms_per_byte`` stays.
    """
    target_ms = known_ms / (1 + tuning.TIGHT_GAP)
    if context.plain.peak_bytes <= budget_bytes or not bound.step_ms < target_ms <= bound.step_ms * (
        1 + tuning.TIGHTEN_MAX_GAP
    ):
        return bound
    floor_ms, best_ms = context.floor_ms, bound.step_ms
    slots: set[int] = set()
    work = 0
    for _ in range(tuning.TIGHTEN_ROUNDS):
        model = Relaxation(context, budget_bytes, slots=slots)
        program = model.program
        if len(program.row_upper) > tuning.TIGHTEN_MAX_ROWS:
            break
        for column in chain(model.s.values(), *model.A.values(), *model.N.values()):
            program.integer[column] = True
        limit = (target_ms - floor_ms) / model.ms_unit
        # HiGHS prunes by its cutoff, but takes solutions above it as well: the row forbids them.
        program.row({column: cost for column, cost in enumerate(program.cost) if cost}, upper=limit)
        nodes = tuning.TIGHTEN_ROUND_WORK // len(program.row_upper)
        answer = program.minimise(gap=0.0, slack=0.0, node_limit=nodes, time_limit_s=math.inf, first=True, cutoff=limit)
        proven = limit if answer.status == "infeasible" else min(answer.bound, limit)
        best_ms = max(best_ms, floor_ms + proven * (1 - tuning.BOUND_TOLERANCE) * model.ms_unit)
        work += len(program.row_upper) * answer.iterations
        if answer.status == "infeasible" or work > tuning.TIGHTEN_WORK:
            break
        values = answer.values if len(answer.values) else program.relax().values
        more = violated_stages(model, values, budget_bytes) if len(values) else []
        if not more:
            break
        slots.update(more)
    return replace(bound, step_ms=best_ms)
