"""The bound of plans that may move storages holds for whatever they move and whenever, and says enough to be useful."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples
from support.strategies import linked_decoder, small_graphs
from support.toy_graphs import chain, unit_costs

from lowtide.graph.costs import DISK, HOST, Link
from lowtide.graph.step_graph import UNPACK
from lowtide.plan import CPU_OFFLOAD, DISK_OFFLOAD, RECOMPUTE, Moves
from lowtide.simulation.simulator import simulate, simulate_actions
from lowtide.solvers.dispatch import solve
from lowtide.solvers.graph_queries import complete_actions, recomputable
from lowtide.solvers.lower_bound import bound, columns
from lowtide.solvers.lower_bound.bound import bound_peak_with_offload, bound_time
from lowtide.solvers.lower_bound.unavoidable import Unavoidable, unavoidable_with_offload
from lowtide.solvers.search_context import SearchContext


def random_plans(graph, costs, data, count=5):
    """Step time and peak of plans that save, recompute and move as it comes."""
    movable = sorted(unavoidable_with_offload(graph).movable)
    unpacks = sum(kind == UNPACK for kind, _ in graph.events)
    for _ in range(count):
        moved = {s: data.draw(st.sampled_from(["", DISK_OFFLOAD, CPU_OFFLOAD])) for s in movable}
        moved = {s: a for s, a in moved.items() if a}
        picked = {s for s in sorted(recomputable(graph)) if data.draw(st.booleans())} - moved.keys()
        actions = {**complete_actions(graph, picked & graph.stored, picked - graph.stored), **moved}
        replays = {s: data.draw(st.integers(1, 3)) for s, a in actions.items() if a == RECOMPUTE}
        away_from = {s: data.draw(st.integers(0, unpacks - 1)) for s in moved if data.draw(st.booleans())}
        line = simulate_actions(graph, costs, actions, replays, Moves(data.draw(st.integers(0, 40)), away_from))
        yield line.step_ms, line.peak_bytes


def beaten(graph, costs, found):
    wrong = []
    for ms, peak in found:
        least = bound_time(SearchContext(graph, costs), max(peak, 1), {DISK: None, HOST: None})
        wrong += [(ms, peak, least)] if least.step_ms > ms + 1e-6 or peak < bound_peak_with_offload(graph) else []
    return wrong


def linked(graph, data):
    speeds = st.sampled_from([0.5e3, 3e3, 20e3, 1e6])
    links = {
        tier: Link(data.draw(speeds), data.draw(speeds), data.draw(st.sampled_from([0.0, 0.7])))
        for tier in (DISK, HOST)
    }
    return unit_costs(graph, record_us=300.0, dispatch_us=50.0, replay_us=100.0, links=links)


@settings(max_examples=examples(150), deadline=None)
@given(graph=small_graphs(most_ops=10), data=st.data())
def test_no_plan_that_moves_and_replays_as_it_comes_beats_the_bound(graph, data):
    costs = linked(graph, data)

    assert beaten(graph, costs, random_plans(graph, costs, data)) == []


@pytest.mark.parametrize("wrong", ["no time hides transfers", "what is moved is certain"])
def test_a_bound_that_claims_too_much_is_caught(monkeypatch, wrong):
    graph = chain(12)
    costs = unit_costs(graph, links={DISK: Link(16e3, 16e3)})  # half a millisecond for each storage, which an op hides
    plain = simulate_actions(graph, costs, {})
    budget = plain.peak_bytes - 4 * 8
    line = simulate(graph, costs, solve(graph, costs, budget, offload=("disk",)))
    assert line.step_ms < plain.step_ms + 0.1
    assert bound_time(SearchContext(graph, costs), budget, {DISK: None}).step_ms <= line.step_ms

    if wrong == "no time hides transfers":
        monkeypatch.setattr(SearchContext, "event_times", lambda self, *_: [1.0] * (len(self.graph.events) + 1))
    else:
        monkeypatch.setattr(bound, "unavoidable_with_offload", Unavoidable)
        monkeypatch.setattr(columns, "unavoidable_with_offload", Unavoidable)

    assert bound_time(SearchContext(graph, costs), budget, {DISK: None}).step_ms > line.step_ms + 0.5


def test_a_link_that_carries_next_to_nothing_leaves_the_bound_of_recomputing_alone():
    graph, costs = linked_decoder(speed=1e-7)
    peak = simulate_actions(graph, costs, {}).peak_bytes
    budget = graph.resident_bytes + int(0.45 * (peak - graph.resident_bytes))

    alone, joint = (
        bound_time(SearchContext(graph, costs), budget),
        bound_time(SearchContext(graph, costs), budget, {DISK: None}),
    )

    assert costs.plain_step_ms < joint.step_ms <= alone.step_ms and joint.step_ms > 0.99 * alone.step_ms


@pytest.mark.thorough
def test_the_bound_rises_as_links_slow_down_and_as_less_may_be_moved():
    budgets = "45%"
    times = []
    for speed in (10, 1, 0.3, 0.1, 0.03, 0.01):
        graph, costs = linked_decoder(speed)
        plan = solve(graph, costs, budgets, offload=("disk",))
        times.append(plan.bound_ms)
        assert plan.bound_ms <= plan.predicted_step_ms and plan.gap >= 0
    graph, costs = linked_decoder(10)
    little = bound_time(SearchContext(graph, costs), plan.budget_bytes, {DISK: 20_000}).step_ms

    assert times == sorted(times) and times[-1] > times[0] and little > times[0]


def test_what_no_plan_can_have_is_infinite():
    graph, costs = linked_decoder(1)
    least = bound_peak_with_offload(graph)

    assert math.isinf(bound_time(SearchContext(graph, costs), least - 1, {DISK: None}).step_ms)
    assert math.isfinite(bound_time(SearchContext(graph, costs), least, {DISK: None}).step_ms)
