"""What the model decides as one: outputs of an op that backward reads all at once."""

import time

from support.toy_graphs import Step, unit_costs

from lowtide.solvers.dispatch import solve
from lowtide.solvers.milp.coarsening import CoarseGraph
from lowtide.solvers.search_context import SearchContext

NUM_CALLS, NUM_STORED = 8, 12


def opaque_calls():
    """Calls as of compiled layers: each reads the last one's output, and stores that and many tensors of its own."""
    step = Step()
    x = step.parameter()
    for _ in range(NUM_CALLS):
        stored = (x,)
        x, *_ = step.op(x, makes=(4, *[8] * NUM_STORED), saves=lambda made, stored=stored: (*stored, *made[1:]))
    return step.graph()


def test_what_a_call_stores_is_kept_and_made_again_as_one():
    graph = opaque_calls()

    coarse = CoarseGraph(SearchContext(graph, unit_costs(graph)))

    # Of each call what it stores, and its output, which the next call stores.
    assert len(coarse.trigger_events) == 2 * NUM_CALLS - 1
    assert [len(group.decisions) for group in coarse.groups] == [2] * (NUM_CALLS - 1) + [1]
    assert {len(group.decisions[0].pieces) for group in coarse.groups} == {NUM_STORED}
    assert coarse.size < 2 * NUM_CALLS**2


def test_calls_are_planned_at_once():
    graph = opaque_calls()
    plain_bytes = solve(graph, unit_costs(graph), 10**9).plain_peak_bytes
    start_s = time.process_time()

    replays = [
        solve(graph, unit_costs(graph), share * plain_bytes // 10).counts["recompute"] // NUM_STORED
        for share in (4, 6, 8)
    ]

    assert time.process_time() - start_s < 5.0
    assert replays == [5, 4, 2]
