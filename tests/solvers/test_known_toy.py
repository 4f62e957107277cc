"""A toy that other planners' numbers are known for: the least share of forward matmul FLOPs that runs again.

Eight pre-norm blocks with every operation written out, gradients None before the step (``toy`` of
``benchmarks/cases.py`` has them allocated). Its plain peak is 100.8 MiB, its peak under full checkpointing 36.3 MiB at
81.1 %. The numbers to reach, of a throw-away planner that was given one model of all blocks: 33.5 MiB at 37.7 %, 36.3
at 32.7 %, 32 at 40.4 %.
"""

from dataclasses import replace
from functools import cache
from math import ceil

import pytest
from support.case_graphs import load_case

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import FREE, StepGraph
from lowtide.solvers.dispatch import solve
from lowtide.solvers.lower_bound.bound import bound_time
from lowtide.solvers.search_context import SearchContext

MIB = 2**20
ROWS = 2 * 256
WIDTH = 256
# Multiply-adds of all matmuls of one block, by row: q, k, v, o; gate, up, down; q k^T and its product with v.
BLOCK = 4 * WIDTH * WIDTH + 3 * WIDTH * 672 + 2 * 256 * WIDTH
UNIT = 8 * BLOCK * ROWS // 888  # 1/888 of all; each matmul is 8 or 21 of them


@cache
def first_step() -> StepGraph:
    """The toy's step where each gradient is made by backward and stays."""
    graph, _ = load_case("toy")
    stays: set[int] = set()
    for op in graph.ops:
        if op.backward and any(graph.storages[s].kind == "gradient" for s in op.writes):
            stays.update(s for s in op.reads if s not in op.writes)
    events = tuple((kind, number) for kind, number in graph.events if kind != FREE or number not in stays)
    return replace(graph, resident=graph.resident | {"gradients": 0}, events=events)


@cache
def matmul_units() -> Costs:
    """What each forward matmul takes; everything else is free."""
    graph = first_step()

    def units(op) -> float:
        if op.backward or op.name not in ("aten.mm.default", "aten.bmm.default"):
            return 0.0
        weights = [graph.storages[s].bytes // 4 for s in op.reads if graph.storages[s].kind == "parameter"]
        return ROWS * (weights[0] if weights else 256 * WIDTH) / UNIT

    return Costs(tuple(units(op) for op in graph.ops))


def above_start(peak_bytes: int) -> float:
    return (peak_bytes - first_step().resident_bytes) / MIB


def test_the_toy_is_the_one_whose_numbers_are_known():
    plain, full = (solve(first_step(), matmul_units(), method=method) for method in ("none", "full"))

    assert matmul_units().plain_step_ms == 888
    assert above_start(plain.predicted_peak_bytes) == pytest.approx(100.8, abs=0.05)
    assert above_start(full.predicted_peak_bytes) == pytest.approx(36.33, abs=0.005)
    assert 100 * full.predicted_overhead == pytest.approx(81.1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("mib", "percent"), [(33.5, 37.7), (36.3, 32.7), (32, 40.4)])
def test_the_toy_reaches_the_known_numbers_and_nothing_can_be_below_them(mib, percent):
    graph, costs = first_step(), matmul_units()
    budget_bytes = graph.resident_bytes + int(mib * MIB)

    plan = solve(graph, costs, budget_bytes, gap=0.0, time_limit_s=600)
    bound_ms = bound_time(SearchContext(graph, costs), budget_bytes).step_ms

    assert plan.predicted_peak_bytes <= budget_bytes
    assert round(100 * plan.predicted_overhead, 1) == percent
    # Only whole units can be replayed, and the bound leaves none out.
    assert round(plan.predicted_step_ms) == ceil(bound_ms - 1e-6)
