"""Simulated steps with offloaded storages, against timelines computed by hand."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples
from support.toy_graphs import Step, chain, decoder, decoder_costs, unit_costs

from lowtide.errors import GraphFormatError, PlanMismatchError
from lowtide.graph.costs import DISK, HOST, Link
from lowtide.graph.json_format import costs_from_dict, costs_to_dict
from lowtide.graph.step_graph import UNPACK
from lowtide.plan import CPU_OFFLOAD, DISK_OFFLOAD, RECOMPUTE, SAVE, Moves, Plan
from lowtide.simulation.simulator import simulate, simulate_actions
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.search_context import SearchContext

FAST = Link(store_bytes_per_s=1e12, fetch_bytes_per_s=1e12)
BYTE_A_MS = Link(store_bytes_per_s=1e3, fetch_bytes_per_s=1e3)


def linked(graph, link=FAST, tier=DISK, **extra):
    return unit_costs(graph, links={tier: link}, **extra)


def unpacks(graph):
    return [at for at, (kind, _) in enumerate(graph.events) if kind == UNPACK]


def moved(line, direction):
    return [(t.storage, t.start_ms, t.end_ms, t.waited_ms) for t in line.transfers if t.direction == direction]


def test_an_offloaded_storage_takes_no_memory_between_its_copy_and_its_fetch():
    graph = chain(3, size=8)  # x1 = f(w), x2 = f(x1), x3 = f(x2): each op stores what it reads

    line = simulate(graph, linked(graph), {1: DISK_OFFLOAD})

    # run pack | run pack free(x1) | run pack free(x2) free(x3): nothing pushes the copy of x1 out before backward asks
    assert line.live_bytes[:9] == (8, 8, 16, 16, 16, 24, 24, 24, 16)
    # The first unpack (of x2) settles it. x2 and its gradient; x2 goes; x1 comes when it is needed, and its gradient.
    assert line.live_bytes[9:13] == (8, 16, 16, 8)
    assert line.live_bytes[13:18] == (16, 24, 24, 16, 8)
    assert line.peak_bytes == simulate(graph, linked(graph), {}).peak_bytes and line.live_bytes[-1] == 0


def test_the_next_copy_settles_the_one_before_it_when_the_limit_is_reached():
    graph = chain(4, size=8)
    actions = {1: DISK_OFFLOAD, 2: DISK_OFFLOAD, 3: DISK_OFFLOAD}

    narrow = simulate_actions(graph, linked(graph), actions, moves=Moves(max_inflight_bytes=8))
    wide = simulate_actions(graph, linked(graph), actions, moves=Moves(max_inflight_bytes=24))

    backward_start = unpacks(graph)[0]
    assert max(narrow.live_bytes[:backward_start]) == 2 * 8  # one read, one made: each copy had settled
    assert max(wide.live_bytes[:backward_start]) == 4 * 8  # as the plain step
    assert (
        narrow.live_bytes[backward_start] == wide.live_bytes[backward_start] == 8
    )  # all settled; the first fetch counts


def test_copies_queue_on_their_link_and_a_reached_limit_makes_the_step_wait():
    graph = chain(4, size=3)
    actions = {1: DISK_OFFLOAD, 2: DISK_OFFLOAD, 3: DISK_OFFLOAD}

    line = simulate_actions(graph, linked(graph, BYTE_A_MS), actions, moves=Moves(max_inflight_bytes=3))

    # Ops end at 1, 2, ...; a copy takes 3 ms, and before the next sets out it has to have settled.
    assert moved(line, "store") == [(1, 1.0, 4.0, 2.0), (2, 4.0, 7.0, 2.0), (3, 7.0, 10.0, 2.0)]


def test_a_fetch_that_starts_early_hides_and_one_on_demand_is_waited_for():
    graph = chain(4, size=3)
    actions = {1: DISK_OFFLOAD}
    costs = linked(graph, BYTE_A_MS)

    late = simulate_actions(graph, costs, actions)
    early = simulate_actions(graph, costs, actions, moves=Moves(fetch_at={1: 0}))

    # Forward ends at 4 ms. Backward unpacks x3, x2 and x1, an op of 1 ms after each.
    assert moved(late, "fetch") == [(1, 6.0, 9.0, 3.0)]
    assert moved(early, "fetch") == [(1, 4.0, 7.0, 1.0)]
    assert (late.stall_ms, late.step_ms) == (3.0, 8 + 3.0)
    assert (early.stall_ms, early.step_ms) == (1.0, 8 + 1.0)


def test_a_fetched_storage_counts_from_the_start_of_its_fetch():
    graph = chain(4, size=8)

    late = simulate_actions(graph, linked(graph), {1: DISK_OFFLOAD})
    early = simulate_actions(graph, linked(graph), {1: DISK_OFFLOAD}, moves=Moves(fetch_at={1: 0}))

    first, _, last = unpacks(graph)[:3]
    assert [e - b for e, b in zip(early.live_bytes[first:last], late.live_bytes[first:last])] == [8] * (last - first)
    assert early.live_bytes[last:] == late.live_bytes[last:]


def test_a_fetch_waits_for_its_own_copy_and_latency_counts_each_way():
    graph = chain(2, size=3)
    slow = Link(store_bytes_per_s=1e3, fetch_bytes_per_s=3e3, latency_ms=0.5)

    line = simulate_actions(graph, linked(graph, slow), {1: DISK_OFFLOAD})

    assert moved(line, "store") == [(1, 1.0, 4.5, 2.5)]  # backward asks at 2 ms
    assert moved(line, "fetch") == [(1, 4.5, 6.0, 1.5)]


def test_tiers_have_links_of_their_own():
    graph = chain(4, size=3)
    costs = unit_costs(graph, links={HOST: BYTE_A_MS, DISK: BYTE_A_MS})
    actions = {1: DISK_OFFLOAD, 2: CPU_OFFLOAD}

    line = simulate_actions(graph, costs, actions, moves=Moves(max_inflight_bytes=6))

    assert [(t.tier, t.start_ms) for t in line.transfers if t.direction == "store"] == [("disk", 1.0), ("host", 2.0)]


def test_a_replay_that_reads_an_offloaded_storage_fetches_it():
    step = Step()
    x = step.op(step.parameter(), makes=(8,), saves="nothing")
    y = step.op(x, makes=(2,), saves="nothing")
    step.op(y, makes=(1,))
    graph = step.graph()

    line = simulate(graph, linked(graph), {x: DISK_OFFLOAD, y: RECOMPUTE})

    unpack = unpacks(graph)[0]
    assert line.live_bytes[unpack - 1] == 8  # the copy of x has not settled
    assert [r.op for r in line.replays] == [1]
    assert line.event_peak_bytes[unpack] == 8 + 2  # x is back, and y is made
    assert line.live_bytes[unpack] == 2


def test_the_tapes_own_work_counts_for_transfers_too():
    graph = chain(3, size=8)
    costs = linked(graph, dispatch_us=1000, record_us=100, replay_us=10, move_us=2)

    line = simulate(graph, costs, {1: DISK_OFFLOAD})

    assert line.step_ms == pytest.approx(6 + 3 * 1.0 + 0.1 + 0.01 + 0.002)
    assert line.transfers[-1].end_ms < line.step_ms


def test_what_may_not_be_offloaded_is_refused_by_name():
    step = Step()
    x = step.op(step.parameter(), makes=(8,), saves="nothing", fixed="written during the step")
    step.op(x, makes=(1,))
    graph = step.graph()

    with pytest.raises(PlanMismatchError, match=f"storage {x} cannot be moved: written during the step. Save it."):
        simulate(graph, linked(graph), {x: DISK_OFFLOAD})
    with pytest.raises(PlanMismatchError, match="storage 0 cannot be moved: it was there before the step"):
        simulate(graph, linked(graph), {0: DISK_OFFLOAD})
    with pytest.raises(PlanMismatchError, match="needs the link to the host tier, and costs knows none"):
        simulate(chain(3), linked(chain(3)), {1: CPU_OFFLOAD})
    with pytest.raises(PlanMismatchError, match="action 'compress' is not known"):
        simulate(chain(3), linked(chain(3)), {1: "compress"})


@st.composite
def decisions(draw):
    graph = decoder(layers=2)
    chosen = draw(st.lists(st.sampled_from(sorted(graph.stored)), max_size=8, unique=True))
    recomputed = draw(st.lists(st.sampled_from(sorted(graph.stored)), max_size=8, unique=True))
    at = draw(st.dictionaries(st.sampled_from(sorted(graph.stored)), st.integers(0, 60), max_size=8))
    actions = complete_actions(graph, [s for s in recomputed if s not in chosen])
    actions.update(dict.fromkeys(chosen, DISK_OFFLOAD))
    return graph, actions, Moves(draw(st.integers(0, 20_000)), at)


@settings(max_examples=examples(150), deadline=None)
@given(drawn=decisions(), speed=st.floats(1e3, 1e12))
def test_offloads_leave_nothing_behind_and_bytes_do_not_depend_on_the_links_speed(drawn, speed):
    graph, actions, moves = drawn
    costs = decoder_costs(graph)
    fast, slow = (
        simulate_actions(graph, dataclasses.replace(costs, links={DISK: link}), actions, moves=moves)
        for link in (FAST, Link(speed, speed / 2, 0.1))
    )

    keep = {s: SAVE if a == DISK_OFFLOAD else a for s, a in actions.items()}
    kept = simulate_actions(graph, costs, keep)
    assert fast.live_bytes[-1] == slow.live_bytes[-1] == kept.live_bytes[-1]
    assert fast.event_peak_bytes == slow.event_peak_bytes
    assert slow.step_ms >= fast.step_ms > 0
    # An original is never gone earlier than under a plan without moves, and comes at most once more.
    extra = sum(graph.storages[s].bytes for s, a in actions.items() if a == DISK_OFFLOAD)
    assert all(m <= k + extra for m, k in zip(fast.event_peak_bytes, kept.event_peak_bytes))
    for tier_use in (fast.transfers, slow.transfers):
        for direction in ("store", "fetch"):
            mine = [t for t in tier_use if t.direction == direction]
            assert all(a.end_ms <= b.start_ms for a, b in pairwise(mine))


def hand_made(graph, actions, moves=None, link=FAST):
    candidate = Candidate(actions, moves=moves or Moves())
    return build_plan(SearchContext(graph, linked(graph, link)), candidate, method="none")


def test_a_plan_with_offloads_survives_json():
    graph = chain(4, size=8)
    actions = {1: DISK_OFFLOAD, 2: SAVE, 3: RECOMPUTE}

    plan = hand_made(graph, actions, Moves(max_inflight_bytes=16, fetch_at={1: 1}))
    again = Plan.from_json(plan.to_json())

    assert again == plan and again.moves == Moves(16, {1: 1})
    assert again.tiers == {DISK} and again.counts["disk_offload"] == 1
    assert simulate(graph, linked(graph), again).step_ms == plan.predicted_step_ms


def test_a_damaged_fetch_is_refused():
    plan = hand_made(chain(3), {1: DISK_OFFLOAD, 2: SAVE}, Moves(8, {1: 1}))
    bad = dataclasses.replace(plan, decisions=(dataclasses.replace(plan.decisions[0], fetch_at=-1),))

    with pytest.raises(GraphFormatError, match=r"decisions\[0\]"):
        Plan.from_json(bad.to_json())


def test_explain_shows_what_links_carry_over_the_step():
    graph = chain(4, size=3)
    plan = hand_made(graph, {1: DISK_OFFLOAD}, link=BYTE_A_MS)

    text = str(plan.explain())

    store, fetch = plan.explain().links
    assert (store.tier, store.direction, store.bytes, store.busy_ms, store.waited_ms) == ("disk", "store", 3, 3.0, 0.0)
    assert (fetch.direction, fetch.busy_ms, fetch.waited_ms) == ("fetch", 3.0, 3.0)
    assert sum(fetch.shares) / len(fetch.shares) == pytest.approx(3 / 11, abs=1e-3)
    assert "disk store" in text and "busy 3.0 ms, waited 3.0 ms" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_links_are_part_of_a_costs_file():
    costs = unit_costs(chain(2), links={DISK: Link(1e9, 2e9, 0.25)})

    assert costs_from_dict(costs_to_dict(costs)) == costs
    for broken in ({"tape": [1.0, 1.0, 0.0]}, {"disk": [0.0, 1.0, 0.0]}, {"disk": [1.0]}, []):
        with pytest.raises(GraphFormatError, match="links"):
            costs_from_dict({**costs_to_dict(costs), "links": broken})
