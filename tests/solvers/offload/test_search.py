"""One plan that saves, recomputes and moves: with a fast link much moves, with a slow one nothing does."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from support.offloads import movable
from support.quick import is_quick, thorough_but
from support.strategies import linked_decoder
from support.toy_graphs import Step, chain, decoder, linear_tanh

from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.costs import DISK, HOST, Costs, Link
from lowtide.graph.step_graph import UNPACK
from lowtide.plan import DISK_OFFLOAD, Moves
from lowtide.simulation.simulator import simulate, simulate_actions
from lowtide.solvers import graph_queries
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.dispatch import solve
from lowtide.solvers.graph_queries import complete_actions, recomputable
from lowtide.solvers.lower_bound.bound import bound_peak_with_offload
from lowtide.solvers.milp.highs import LinearProgram, MilpResult
from lowtide.solvers.offload import search
from lowtide.solvers.offload.rewrite import rewrite_without_tiers
from lowtide.solvers.offload.transfer_schedule import schedule_transfers
from lowtide.solvers.search_context import SearchContext


@pytest.mark.parametrize("seed", range(40))
def test_a_step_rewritten_without_tiers_has_the_peak_of_the_simulator(seed):
    chance = random.Random(seed)
    graph = chance.choice([chain(8), linear_tanh(6, 16), decoder(layers=2)])
    costs = Costs((1.0,) * len(graph.ops), links={DISK: Link(1e9, 1e9)})
    actions = dict.fromkeys(chance.sample(movable(graph), chance.randint(1, len(movable(graph)))), DISK_OFFLOAD)
    unpacks = sum(kind == UNPACK for kind, _ in graph.events)
    fetch_at = {s: chance.randrange(unpacks) for s in actions if chance.random() < 0.6}
    moves = Moves(chance.choice([0, 30, 20_000, 10**6]), fetch_at)

    simulated = simulate_actions(graph, costs, actions, moves=moves)
    line = rewrite_without_tiers(SearchContext(graph, costs), actions, moves).plain.timeline

    assert (line.peak_bytes, line.live_bytes[-1]) == (simulated.peak_bytes, simulated.live_bytes[-1])


def test_with_a_fast_link_what_is_dear_moves_and_recomputing_hardly_costs():
    graph, costs = linked_decoder(speed=10)
    alone = solve(graph, costs, "45%")

    plan = solve(graph, costs, "45%", offload=("disk",))

    assert alone.predicted_overhead > 0.1 and plan.predicted_overhead < 0.02
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    moved = [d for d in plan.decisions if d.action == DISK_OFFLOAD]
    assert moved and simulate(graph, costs, plan).step_ms == plan.predicted_step_ms


def test_with_a_link_between_dear_products_move_and_cheap_ops_are_recomputed():
    graph, costs = linked_decoder(speed=0.5)

    plan = solve(graph, costs, "60%", offload=("disk",))

    mean_ms = {
        action: sum(costs.op_ms[graph.storages[d.storage].op] for d in mine) / sum(d.bytes for d in mine)
        for action in ("recompute", "disk_offload")
        if (mine := [d for d in plan.decisions if d.action == action])
    }
    assert mean_ms["disk_offload"] > 2 * mean_ms["recompute"]
    assert plan.predicted_overhead < solve(graph, costs, "60%").predicted_overhead / 2


def test_with_a_slow_link_nothing_moves_and_the_plan_is_as_fast_as_without():
    graph, costs = linked_decoder(speed=0.002)

    plan = solve(graph, costs, "45%", offload=("disk",))

    assert plan.counts["disk_offload"] == 0 and plan.counts["recompute"] > 0
    assert plan.predicted_step_ms == solve(graph, costs, "45%").predicted_step_ms


def test_a_link_of_long_latency_moves_nothing_either():
    graph, costs = linked_decoder(speed=10, latency_ms=1e3)

    assert solve(graph, costs, "45%", offload=("disk",)).counts["disk_offload"] == 0


def test_a_budget_that_the_plain_step_meets_moves_nothing():
    graph, costs = linked_decoder(speed=10)

    plan = solve(graph, costs, "100%", offload=("disk",))

    assert plan.keeps_everything and plan.predicted_overhead == 0


def test_moving_reaches_budgets_that_recomputing_cannot_and_says_how_far_it_goes():
    graph, costs = linked_decoder(speed=2)
    with pytest.raises(BudgetInfeasibleError) as alone:
        solve(graph, costs, 1)
    with pytest.raises(BudgetInfeasibleError, match="other tiers used: every plan needs at least") as moving:
        solve(graph, costs, graph.resident_bytes + 1, offload=("disk",))
    assert moving.value.least_bytes < alone.value.least_bytes

    plan = solve(graph, costs, moving.value.least_bytes, offload=("disk",))

    assert plan.predicted_peak_bytes <= moving.value.least_bytes and plan.counts["disk_offload"] > 0


def test_no_more_moves_than_the_tier_may_hold():
    graph, costs = linked_decoder(speed=10)
    everything = solve(graph, costs, "45%", offload=("disk",))
    moved = sum(d.bytes for d in everything.decisions if d.action == DISK_OFFLOAD)

    plan = solve(graph, costs, "45%", offload={"disk": moved // 3})

    assert 0 < sum(d.bytes for d in plan.decisions if d.action == DISK_OFFLOAD) <= moved // 3


def test_of_two_tiers_the_faster_is_filled_first():
    graph, costs = linked_decoder(speed=10)
    disk = costs.links[DISK]
    host = Link(10 * disk.store_bytes_per_s, 10 * disk.fetch_bytes_per_s)
    costs = replace(costs, links={DISK: disk, HOST: host})

    both = solve(graph, costs, "45%", offload={"disk": None, "host": 20_000})
    wide = solve(graph, costs, "45%", offload=("disk", "host"))

    assert both.bytes_by_action["cpu_offload"] <= 20_000 and both.counts["disk_offload"] > 0
    assert wide.counts["cpu_offload"] > 0 and wide.counts["disk_offload"] == 0


@pytest.mark.parametrize(("speed", "most_gap"), [(10, 0.02), (1, 0.06), (0.1, 0.25)])
def test_the_bound_of_a_plan_that_could_move_is_one_that_moving_cannot_beat(speed, most_gap):
    graph, costs = linked_decoder(speed)

    plan = solve(graph, costs, "45%", offload=("disk",))

    assert plan.bound_ms > costs.plain_step_ms and "saves, recomputes or moves" in plan.bound_model
    assert 0 <= plan.gap <= most_gap and plan.gap < plan.predicted_overhead


def test_fetches_start_late_enough_for_memory_and_early_enough_for_time():
    graph, costs = linked_decoder(speed=2, layers=3)
    actions = dict.fromkeys(movable(graph)[: len(movable(graph)) // 2], DISK_OFFLOAD)
    plain = simulate_actions(graph, costs, {})
    eager = simulate_actions(graph, costs, actions, moves=Moves(10**6, dict.fromkeys(actions, 0)))

    found = schedule_transfers(SearchContext(graph, costs), Candidate(actions), plain.peak_bytes)

    on_demand = simulate_actions(graph, costs, actions, moves=Moves(found.candidate.moves.max_inflight_bytes))
    # On demand each fetch is waited for; all of them at once hold what is saved by moving.
    assert found.timeline.stall_ms < 0.1 * on_demand.stall_ms
    assert found.peak_bytes < eager.peak_bytes
    tight = schedule_transfers(SearchContext(graph, costs), Candidate(actions), found.peak_bytes - 1)
    assert tight.peak_bytes < found.peak_bytes and tight.timeline.step_ms > found.timeline.step_ms


@pytest.mark.parametrize("speed", [0.1, 1.0])
@pytest.mark.parametrize("budget", thorough_but(("60%",), ("80%", "60%", "45%")))
def test_a_joint_plan_is_within_its_budget_and_never_slower_than_recomputing_alone(speed, budget):
    graph, costs = linked_decoder(speed)

    plan = solve(graph, costs, budget, offload=("disk",))

    line = simulate(graph, costs, plan)
    assert line.peak_bytes == plan.predicted_peak_bytes <= plan.budget_bytes
    assert line.step_ms <= solve(graph, costs, budget).predicted_step_ms * 1.001


def test_the_same_question_gets_the_same_plan():
    graph, costs = linked_decoder(speed=1)

    one, two = (solve(graph, costs, "45%", offload=("disk",)) for _ in range(2))

    assert one.decisions == two.decisions


def tiny(seed):
    """A step of five to seven ops with a link, and a budget."""
    chance = random.Random(seed)
    step = Step()
    made = [step.parameter()]
    for _ in range(chance.randint(5, 7)):
        reads = chance.sample(made[-3:], min(len(made[-3:]), chance.choice([1, 1, 2])))
        made.append(step.op(*reads, makes=(chance.randint(4, 12) * 100,), saves=chance.choice(["reads", "makes"])))
    graph = step.graph()
    rate = chance.choice([5e3, 2e4, 5e4, 1e5, 3e5])
    op_ms = tuple(float(chance.randint(1, 9)) for _ in graph.ops)
    costs = Costs(op_ms, dispatch_us=1.0, record_us=1.0, replay_us=1.0, links={DISK: Link(rate, rate)})
    return graph, costs, int(chance.choice([0.5, 0.6, 0.7, 0.8]) * simulate_actions(graph, costs, {}).peak_bytes)


def best_of_all(graph, costs, budget):
    """The least step time of every way to save, recompute or move each storage; infinite where none fits."""
    found, free = [math.inf], recomputable(graph)
    stored = movable(graph)
    for fates in itertools.product(("save", "recompute", DISK_OFFLOAD), repeat=len(stored)):
        asked = dict(zip(stored, fates, strict=True))
        recomputed = [s for s, fate in asked.items() if fate == "recompute"]
        if free.issuperset(recomputed):
            moved = {s: fate for s, fate in asked.items() if fate == DISK_OFFLOAD}
            candidate = Candidate({**complete_actions(graph, recomputed), **moved})
            scheduled = schedule_transfers(SearchContext(graph, costs), candidate, budget)
            found += [scheduled.timeline.step_ms] if scheduled.peak_bytes <= budget else []
    return min(found)


def test_on_tiny_steps_it_is_hardly_ever_slower_than_the_best_of_all():
    ratios = []
    for seed in range(15 if is_quick() else 60):
        graph, costs, budget = tiny(seed)
        best_ms = best_of_all(graph, costs, budget) if len(movable(graph)) <= 6 else math.inf
        if math.isfinite(best_ms):
            ratios.append(solve(graph, costs, budget, offload=("disk",)).predicted_step_ms / best_ms)

    assert len(ratios) > (4 if is_quick() else 15) and max(ratios) < 1.05
    assert sum(ratio <= 1.0001 for ratio in ratios) >= 0.8 * len(ratios)


def test_the_plan_does_not_depend_on_how_fast_the_machine_is(monkeypatch):
    graph, costs = linked_decoder(speed=0.3, layers=3)
    expected = solve(graph, costs, "60%", offload=("disk",))
    now = [0.0]

    def hours_later():
        now[0] += 10_000.0
        return now[0]

    minimise = LinearProgram.minimise

    def in_time(self, *, time_limit_s, **options):
        if time_limit_s < 60:  # on such a machine nothing is found in that
            return MilpResult("limit", np.zeros(0), math.inf, 0.0)
        return minimise(self, time_limit_s=time_limit_s, **options)

    monkeypatch.setattr("time.perf_counter", hours_later)
    monkeypatch.setattr(LinearProgram, "minimise", in_time)

    assert solve(graph, costs, "60%", offload=("disk",)).decisions == expected.decisions


def test_a_budget_below_the_leanest_is_refused_without_trying_loads_of_the_links(monkeypatch):
    graph, costs = linked_decoder(speed=1)
    with pytest.raises(BudgetInfeasibleError) as caught:
        solve(graph, costs, 1, offload=("disk",))
    tried = []
    monkeypatch.setattr(search, "schedule_transfers", lambda *how: tried.append(how))

    for budget in (1, bound_peak_with_offload(graph) - 1, caught.value.least_bytes - 1):
        with pytest.raises(BudgetInfeasibleError) as again:
            solve(graph, costs, budget, offload=("disk",))
        assert again.value.least_bytes == caught.value.least_bytes
    assert tried == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": ("tape",)}, "offload: tier 'tape' is not known. Use 'host' or 'disk'."),
        ({"offload": ("host",)}, "costs knows no link to the host tier. Measure it"),
        ({"offload": {"disk": "40%"}}, "'40%' is not an amount. Pass bytes"),
        ({"offload": ("disk",), "method": "full"}, "has no meaning for method='full'. Leave it out, or use"),
    ],
)
def test_an_offload_that_makes_no_sense_is_refused(options, message):
    graph, costs = linked_decoder(speed=1)

    with pytest.raises(ValueError) as caught:
        solve(graph, costs, "45%", **options)

    assert message in str(caught.value)


def test_what_takes_no_bytes_on_the_device_is_not_moved():
    """What an attention's kernel keeps of its random numbers may lie on the host already: no tape finds it to move."""
    graph = chain(4)
    x = min(graph_queries.movable(graph))
    storages = tuple(replace(s, bytes=0) if s.id == x else s for s in graph.storages)
    assert graph_queries.movable(replace(graph, storages=storages)) == graph_queries.movable(graph) - {x}
