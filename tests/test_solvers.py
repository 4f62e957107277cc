from __future__ import annotations
import itertools, sys, time
from hypothesis import given, settings, strategies as st
import pytest
import toys
from lowtide.errors import BudgetInfeasibleError
from lowtide.simulator import simulate_actions
from lowtide.solvers.front_door import solve
from lowtide.solvers.structure import recomputable, close
from lowtide.plan import SAVE, RECOMPUTE
from lowtide.graph.costs import Costs


@st.composite
def small_graphs(draw):
    step = toys.Step(resident=draw(st.sampled_from([0, 5])))
    made = []
    w = step.parameter()
    n = draw(st.integers(2, 5))
    left = 6
    for i in range(n):
        count = min(draw(st.sampled_from([1, 1, 1, 2])), max(left, 1))
        left -= count
        reads = draw(st.lists(st.sampled_from(made[-4:]), unique=True, min_size=1, max_size=2)) if made else [w]
        makes = tuple(draw(st.integers(1, 12)) for _ in range(count))
        candidates = lambda out: [*reads, *out]
        pick = draw(st.lists(st.booleans(), min_size=len(reads) + count, max_size=len(reads) + count))
        fixed = draw(st.sampled_from(["", "", "", "", "written"]))
        saves = lambda out, reads=tuple(reads), pick=pick: [s for s, p in zip((*reads, *out), pick) if p]
        out = step.op(
            *reads,
            makes=makes,
            saves=saves,
            fixed=fixed,
            workspace=draw(st.sampled_from([0, 0, 3])),
            rng=draw(st.sampled_from([0, 0, 2])),
        )
        made += [out] if count == 1 else list(out)
    return step.graph(keep_output=draw(st.booleans()), backward_workspace=draw(st.sampled_from([0, 4])))


def choices(graph):
    free = sorted(recomputable(graph))
    stored = [s for s in free if s in graph.stored]
    other = [s for s in free if s not in graph.stored]
    for mask in itertools.product((0, 1), repeat=len(free)):
        rec = [s for s, m in zip(free, mask) if m and s in graph.stored]
        kept = [s for s, m in zip(free, mask) if m and s not in graph.stored]
        yield close(graph, rec, kept)


@settings(max_examples=300, deadline=None)
@given(graph=small_graphs(), data=st.data())
def test_oracle(graph, data):
    costs = Costs(
        op_ms=tuple(float(data.draw(st.integers(1, 9))) for _ in graph.ops),
        mode_us=data.draw(st.sampled_from([0.0, 1.0])),
    )
    lines = {}
    for a in choices(graph):
        t = simulate_actions(graph, costs, a)
        lines[tuple(sorted(a.items()))] = (t.step_ms, t.peak_bytes)
    peaks = sorted({p for _, p in lines.values()})
    budget = data.draw(st.sampled_from(peaks))
    best = min(t for t, p in lines.values() if p <= budget)
    plan = solve(graph, costs, budget) if budget else None
    assert plan.predicted_peak_bytes <= budget
    assert plan.predicted_step_ms >= best - 1e-6
    assert plan.predicted_step_ms <= best + 1e-6, (best, plan.predicted_step_ms)
    assert plan.bound_ms <= best + 1e-6
    if peaks[0] > 1:
        with pytest.raises(BudgetInfeasibleError) as e:
            solve(graph, costs, peaks[0] - 1)
        assert e.value.least_bytes == peaks[0]
