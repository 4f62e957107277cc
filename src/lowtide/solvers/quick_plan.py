"""A plan within the budget in a fraction of the time that ``solve`` takes: the fastest of the published methods.

For whoever needs a plan now and replaces it when the search is done. Rotor is left out: its plans are better (16
instead of 23 % overhead on the decoder of 8 layers), and on 48 layers it takes as long as ``solve``. Known weakness:
near the least peak no published method fits, and there is no quick plan.
"""

import time
from contextlib import suppress

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.simulation.simulator import simulate_actions
from lowtide.solvers import tuning
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.published.lazy_candidates import fastest_within
from lowtide.solvers.published.methods import FIXED, lazy_candidates


def quick_plan(graph: StepGraph, costs: Costs, budget_bytes: int) -> Plan | None:
    """The fastest plan of the published methods that stays within ``budget_bytes``; None where none does."""
    start_s = time.perf_counter()
    methods = [*FIXED, "revolve"] if len(graph.ops) <= tuning.QUICK_REVOLVE_OPS else list(FIXED)
    best: tuple[float, str, Candidate] | None = None
    for method in methods:
        with suppress(ValueError):  # no layer repeats
            found = fastest_within(graph, costs, lazy_candidates(graph, costs, method), budget_bytes)
            if found is not None:
                step_ms = simulate_actions(graph, costs, found.actions, found.replays).step_ms
                if best is None or step_ms < best[0]:
                    best = step_ms, method, found
    if best is None:
        return None
    _, method, found = best
    return build_plan(graph, costs, found, method=method, budget_bytes=budget_bytes, start_s=start_s)
