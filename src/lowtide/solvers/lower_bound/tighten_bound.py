"""A sharper bound for one budget: the relaxation of ``bound.py`` with whole decisions, and slots where they matter.

What ``bound.py`` gives away where storages are few and large: half of one may be kept, and what is brought back is only
counted at the end of a slot, of which an op has two. Here branch and bound keeps decisions whole, and slots are added
where they are missed, after Boland, Hewitt, Marshall and Savelsbergh 2017, "The continuous-time service network design
problem", Operations Research 65(5): solve with few slots, look at which stages the answer breaks what was left out, and
solve again with those.

What is asked for is a proof, which is sooner had than an optimum: that nothing satisfies the rows and is faster than
``TIGHT_GAP`` below the known plan. More slots leave each row one that every plan satisfies, so whatever a program on
the way proves is a bound.

Known weaknesses: only for small programs; further than ``TIGHTEN_MAX_GAP`` from the bound, near the least peak, not
even tried. The bound depends on the plan that is known, and may rise with the budget within that distance.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.simulation.simulator import simulate_actions
from lowtide.solvers import tuning
from lowtide.solvers.graph_queries import taped_plain_ms
from lowtide.solvers.lower_bound.bound import Bound
from lowtide.solvers.lower_bound.relaxation import Relaxation
from lowtide.solvers.lower_bound.unavoidable import unavoidable
from lowtide.solvers.lp_rounding import violated_stages


def tighten_bound(graph: StepGraph, costs: Costs, budget_bytes: int, known_ms: float, bound: Bound) -> Bound:
    """Return a bound that proves the known plan nearly the fastest, or the best that was found.

    Args:
        known_ms: Step time of a plan within the budget.
        bound: What ``bound_time`` says; its price stays.
    """
    target_ms = known_ms / (1 + tuning.TIGHT_GAP)
    plain_fits = simulate_actions(graph, costs, {}).peak_bytes <= budget_bytes
    if plain_fits or not bound.step_ms < target_ms <= bound.step_ms * (1 + tuning.TIGHTEN_MAX_GAP):
        return bound
    floor_ms, best_ms = taped_plain_ms(graph, costs), bound.step_ms
    slots: set[int] = set()
    for _ in range(tuning.TIGHTEN_ROUNDS):
        model = Relaxation(unavoidable(graph), costs, budget_bytes, slots=slots)
        program = model.program
        if len(program.row_upper) > tuning.TIGHTEN_MAX_ROWS:
            break
        for column in chain(model.s.values(), *model.A.values(), *model.N.values()):
            program.integer[column] = True
        limit = (target_ms - floor_ms) / model.ms_unit
        program.row({column: cost for column, cost in enumerate(program.cost) if cost}, upper=limit)
        nodes = tuning.TIGHTEN_WORK // len(program.row_upper)
        answer = program.minimise(gap=0.0, slack=0.0, node_limit=nodes, time_limit_s=math.inf, first=True)
        proven = limit if answer.status == "infeasible" else min(answer.bound, limit)
        best_ms = max(best_ms, floor_ms + proven * (1 - tuning.BOUND_TOLERANCE) * model.ms_unit)
        if answer.status == "infeasible":
            break
        values = answer.values if len(answer.values) else program.relax().values
        more = violated_stages(graph, costs, model, values, budget_bytes) if len(values) else []
        if not more:
            break
        slots.update(more)
    return replace(bound, step_ms=best_ms)
