"""How often an op is replayed: the count in a plan, and its accounting."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from math import comb

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples
from support.strategies import small_graphs
from support.toy_graphs import Step, chain, unit_costs
from support.training_steps import drop_all, ran

from lowtide.errors import GraphFormatError, PlanMismatchError
from lowtide.graph.step_graph import UNPACK, StepGraph
from lowtide.plan import RECOMPUTE, SAVE, Plan
from lowtide.simulation.simulator import simulate, simulate_actions
from lowtide.solvers.graph_queries import complete_actions, recomputable


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


# -- the simulator ----------------------------------------------------------------------------------------------------


def test_a_chain_replayed_anew_for_every_step_holds_one_value_between_bursts():
    graph = chain(4, size=8)  # x1 .. x3 are stored

    line = simulate_actions(graph, unit_costs(graph, replay_us=1), dict.fromkeys((1, 2, 3), RECOMPUTE), {1: 3, 2: 2})

    # backward asks for x3, x2, x1; the last run of each is the one it was asked by
    assert ran(line) == [0, 1, 2, 0, 1, 0]
    # (x1) (x1 x2) (x2 x3), then beside the gradient of x3 (x1) (x1 x2), then beside that of x2 (x1)
    assert [r.peak_bytes for r in line.replays] == [8, 16, 16, 16, 24, 16]
    assert line.step_ms == pytest.approx(8 + 6 * 1.001)
    assert line.live_bytes[-1] == 0


def test_the_last_replay_makes_a_value_for_good():
    graph = chain(4, size=8)

    first, second = (
        simulate_actions(graph, unit_costs(graph), dict.fromkeys((1, 2, 3), RECOMPUTE), {x: 2}) for x in (1, 2)
    )

    assert ran(first) == [0, 1, 2, 0]  # x2 is there when it is asked for, x1 is not
    assert ran(second) == [0, 1, 2, 1]  # x1 stays from the first burst on


def squared_and_mapped() -> tuple[StepGraph, int]:
    """y is stored twice by an op, then once by another, whose backward comes first."""
    step = Step()
    y = step.op(step.parameter(), makes=(8,), saves="nothing")
    step.op(y, makes=(1,), saves=(y, y))
    step.op(y, makes=(1,))
    return step.graph(), y


def test_a_value_that_backward_still_has_is_not_made_again():
    graph, y = squared_and_mapped()

    line = simulate_actions(graph, unit_costs(graph), {y: RECOMPUTE}, {y: 5})

    assert ran(line) == [0, 0]  # once for each of the two backward ops
    unpacks = [at for at, (kind, _) in enumerate(graph.events) if kind == UNPACK]
    assert [line.live_bytes[at] for at in unpacks] == [8, 8 + 8, 8 + 8]  # y, beside its gradient from the second on
    assert line.live_bytes[unpacks[1] - 1] == 8  # in between only the gradient


def test_the_count_is_the_ops_and_the_largest_of_its_outputs():
    step = Step()
    a, b = step.op(step.parameter(), makes=(8, 2), saves="nothing")
    step.op(a, makes=(1,))
    step.op(b, makes=(1,))
    graph = step.graph()

    once, twice = (
        simulate_actions(graph, unit_costs(graph), {a: RECOMPUTE, b: RECOMPUTE}, {a: n, b: 1}) for n in (1, 2)
    )

    assert (ran(once), ran(twice)) == ([0], [0, 0])
    asked_for_b = next(at for at, (kind, _) in enumerate(graph.events) if kind == UNPACK)
    assert (once.live_bytes[asked_for_b], twice.live_bytes[asked_for_b]) == (8 + 2, 2)


def test_a_random_op_keeps_its_generator_state_until_its_last_replay():
    step = Step()
    y = step.op(step.parameter(), makes=(8,), saves="nothing", rng=3)
    step.op(y, makes=(1,))
    step.op(y, makes=(1,))
    graph = step.graph()

    line = simulate_actions(graph, unit_costs(graph), {y: RECOMPUTE}, {y: 2})

    first, second = (at for at, (kind, _) in enumerate(graph.events) if kind == UNPACK)
    assert (line.live_bytes[first], line.live_bytes[second]) == (8 + 3, 8 + 8)


def test_a_count_below_one_is_refused():
    graph = chain(3)

    with pytest.raises(PlanMismatchError) as caught:
        simulate_actions(graph, unit_costs(graph), {1: RECOMPUTE}, {1: 0})

    assert str(caught.value) == (
        "storage 1: replays=0. A recomputed storage is made again at least once; give 1 or more, or 'save' it."
    )


@settings(max_examples=examples(150), deadline=None)
@given(graph=small_graphs(), data=st.data())
def test_no_op_runs_more_often_than_planned_and_nothing_is_left(graph, data):
    costs = unit_costs(graph)
    free = sorted(recomputable(graph))
    picked = [s for s in free if data.draw(st.booleans())]
    actions = complete_actions(
        graph, [s for s in picked if s in graph.stored], [s for s in picked if s not in graph.stored]
    )
    dropped = [s for s, action in actions.items() if action == RECOMPUTE]
    counts = {s: data.draw(st.integers(1, 4)) for s in dropped}

    once = simulate_actions(graph, costs, actions)
    line = simulate_actions(graph, costs, actions, counts)

    most = {op: max(counts.get(s, 1) for s in graph.ops[op].makes) for op in ran(line)}
    assert all(n <= most[op] for op, n in Counter(ran(line)).items())
    assert set(ran(line)) == set(ran(once))
    assert line.live_bytes[-1] == once.live_bytes[-1]


# -- a schedule from a paper ------------------------------------------------------------------------------------------


def revolve_steps(length: int, snapshots: int) -> int:
    """Least forward steps to reverse ``length`` with ``snapshots``, the initial state's among them.

    Griewank and Walther 2000, "Algorithm 799: revolve", ACM TOMS 26(1), https://doi.org/10.1145/347837.347846
    """
    r = 0
    while comb(snapshots + r, snapshots) < length:
        r += 1
    return r * length - comb(snapshots + r, r - 1) if r else 0


@cache
def split(length: int, snapshots: int) -> tuple[int, int]:
    """(forward steps, where the next snapshot goes) for ``length`` steps from a state that is kept."""
    if length == 1 or snapshots == 1:
        return length * (length - 1) // 2, 0
    return min((m + split(length - m, snapshots - 1)[0] + split(m, snapshots)[0], m) for m in range(1, length))


def revolve(length: int, snapshots: int) -> tuple[dict[int, str], dict[int, int]]:
    """Actions and counts for ``chain(length)``, whose x1, x2, ... are storages 1, 2, ..."""
    runs: Counter[int] = Counter()
    saved = {length - 1}

    def advance(first: int, last: int, forward: bool) -> None:
        if not forward:
            runs.update(range(first + 1, last + 1))

    def reverse(first: int, end: int, snapshots: int, forward: bool) -> None:
        """Steps ``first`` to ``end`` - 1; ``forward``: the step's own forward pass comes by here."""
        if end - first == 1:
            return
        if snapshots == 1:
            for last in reversed(range(first + 1, end)):
                advance(first, last, forward and last == end - 1)
            return
        middle = first + split(end - first, snapshots)[1]
        advance(first, middle, forward)
        if forward:
            saved.add(middle)
        reverse(middle, end, snapshots - 1, forward)
        reverse(first, middle, snapshots, False)

    reverse(0, length, snapshots, True)
    actions = {x: SAVE if x in saved else RECOMPUTE for x in range(1, length)}
    return actions, {x: runs[x] for x in range(1, length) if x not in saved}


@pytest.mark.parametrize(("length", "snapshots"), [(5, 1), (10, 3), (21, 2), (56, 4)])
def test_counts_carry_out_revolve(length, snapshots):
    graph = chain(length, size=8)
    actions, counts = revolve(length, snapshots)

    line = simulate_actions(graph, unit_costs(graph), actions, counts)

    # The step's own forward pass are the first length - 1 of the paper's steps.
    assert len(line.replays) == revolve_steps(length, snapshots) - (length - 1)
    # One snapshot is the parameter; beside the others two values and a gradient, or a value and two gradients.
    assert line.peak_bytes == 8 * (snapshots - 1) + 24


# -- plans ------------------------------------------------------------------------------------------------------------


def test_counts_survive_the_file_and_a_plan_without_them_loads():
    plan = drop_all(chain(4), 3)
    body = json.loads(plan.to_json())

    assert Plan.from_json(plan.to_json()) == plan
    assert plan.replays_of() == {1: 3, 2: 3, 3: 3}
    table = body["decisions"]
    body["decisions"] = {"columns": table["columns"][:7], "rows": [row[:7] for row in table["rows"]]}
    assert Plan.from_json(json.dumps(body)).replays_of() == {}
    assert plan.predicted_peak_bytes == simulate(chain(4), unit_costs(chain(4)), plan).peak_bytes == 24


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", None])
def test_a_plan_with_a_count_that_is_none_is_refused(count):
    body = json.loads(drop_all(chain(3), 2).to_json())
    body["decisions"]["rows"][0][7] = count

    with pytest.raises(GraphFormatError, match=r"not a plan: field 'decisions\[0\]' is .* Make the plan again."):
        Plan.from_json(json.dumps(body))
