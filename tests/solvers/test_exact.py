"""Laws over random step graphs, exact counts on toys, and every method's own promise."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracle import oracle
from support.quick import examples
from support.strategies import small_cases, small_graphs
from support.toy_graphs import Step, chain, decoder, decoder_costs, linear_tanh, unit_costs

from lowtide.errors import BudgetInfeasibleError, LowtideError
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.simulation.simulator import simulate
from lowtide.solvers import tuning
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.dispatch import METHODS, solve
from lowtide.solvers.exact import ExactSearch
from lowtide.solvers.graph_queries import complete_actions, layers
from lowtide.solvers.lower_bound.bound import bound_peak
from lowtide.solvers.published.full import full
from lowtide.solvers.published.methods import BUDGETED
from lowtide.solvers.search_context import SearchContext, SearchResult


@settings(max_examples=examples(200), deadline=None)
@given(case=small_cases(), data=st.data())
def test_exact_is_as_good_as_trying_everything(case, data):
    graph, costs = case
    everything = oracle(graph, costs)
    budget = data.draw(st.sampled_from(sorted({peak for _, peak in everything if peak > 0})))
    best = min(found for found in everything if found[1] <= budget)

    plan = solve(graph, costs, budget)

    # The fastest within the budget, and of equally fast ones the one with the lower peak.
    assert (pytest.approx(plan.predicted_step_ms), plan.predicted_peak_bytes) == best
    assert plan.bound_ms <= best[0] + 1e-6 and plan.gap >= 0
    assert float(plan.provenance["search_bound"].split()[0]) == pytest.approx(best[0], abs=2e-3)
    assert plan.status == "optimal"


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(case=small_cases())
def test_exact_is_as_good_as_trying_everything_with_up_to_two_replays_of_each_op(case):
    """Local search finds where twice is better, so this holds for graphs that are always the same ones."""
    graph, costs = case
    everything = oracle(graph, costs, most_replays=2)

    for budget in sorted({peak for _, peak in everything if peak > 0}):
        best = min(found for found in everything if found[1] <= budget)
        assert solve(graph, costs, budget).predicted_step_ms <= best[0] + 1e-9


@settings(max_examples=examples(100), deadline=None)
@given(case=small_cases())
def test_the_least_peak_is_no_more_than_replaying_once_can_reach_and_asking_for_it_succeeds(case):
    graph, costs = case
    once, proven = min(peak for _, peak in oracle(graph, costs)), bound_peak(graph)
    if proven < 2:
        return

    with pytest.raises(BudgetInfeasibleError) as caught:
        solve(graph, costs, proven - 1)

    least = caught.value.least_bytes
    assert caught.value.budget_bytes == proven - 1 and proven <= least <= once
    assert solve(graph, costs, least).predicted_peak_bytes == least


def twice_is_leaner():
    """The first op's result is needed at both ends of backward: held in between it costs the peak, made twice not."""
    step = Step()
    x = step.op(step.parameter(), makes=(10,), saves="makes")
    y = step.op(x, makes=(4,), saves="nothing")
    z = step.op(y, makes=(20,), saves="makes", fixed="written in place")
    step.op(x, z, makes=(1,), saves=(x,))
    return step.graph()


def test_an_op_is_replayed_twice_where_that_is_cheaper_in_the_peak():
    graph = twice_is_leaner()
    costs = unit_costs(graph)
    once = min(peak for _, peak in oracle(graph, costs))

    with pytest.raises(BudgetInfeasibleError) as caught:
        solve(graph, costs, 1)
    plan = solve(graph, costs, once - 1)

    assert caught.value.least_bytes < once
    assert plan.predicted_peak_bytes <= once - 1
    assert max(d.replays for d in plan.decisions) == 2


@settings(max_examples=examples(50), deadline=None)
@given(case=small_cases())
def test_more_budget_never_costs_more_time(case):
    graph, costs = case
    peaks = sorted({peak for _, peak in oracle(graph, costs) if peak > 0})

    times = [solve(graph, costs, peak).predicted_step_ms for peak in peaks]

    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(costs.plain_step_ms)


@settings(max_examples=examples(50), deadline=None)
@given(graph=small_graphs(most_ops=14), fraction=st.floats(0.3, 1.0))
def test_a_plan_stays_within_its_budget_by_the_simulator(graph, fraction):
    costs = unit_costs(graph)
    budget = graph.resident_bytes + int(fraction * (simulate(graph, costs, {}).peak_bytes - graph.resident_bytes))
    if budget <= 0:
        return
    try:
        plan = solve(graph, costs, budget)
    except BudgetInfeasibleError as error:
        budget = error.least_bytes
        plan = solve(graph, costs, budget)

    line = simulate(graph, costs, plan)
    assert line.peak_bytes == plan.predicted_peak_bytes <= budget
    assert line.step_ms == plan.predicted_step_ms >= plan.bound_ms


@settings(max_examples=examples(100), deadline=None)
@given(case=small_cases(), data=st.data())
def test_grouped_ops_and_bursts_found_by_the_simulator_cost_little(case, data):
    """The way of large graphs, on small ones: never above the budget, never better than everything."""
    graph, costs = case
    everything = oracle(graph, costs, most_replays=2)
    budget = data.draw(st.sampled_from(sorted({peak for _, peak in everything if peak > 0})))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "PER_OP_MODEL_OPS", 0)
        patch.setattr(tuning, "ALL_BURSTS_SIZE", 0)
        try:
            plan = solve(graph, costs, budget, gap=0.0)
        except BudgetInfeasibleError as error:
            plan = solve(graph, costs, error.least_bytes, gap=0.0)
            budget = error.least_bytes

    assert plan.predicted_peak_bytes <= budget
    assert plan.predicted_step_ms >= min(found for found in everything if found[1] <= budget)[0] - 1e-9
    assert plan.gap >= 0


def test_a_burst_that_no_interval_shows_is_found_by_the_simulator_and_cut_away():
    # Each block's 64 bytes come and go inside a burst, while the gradient of its 100 bytes is there.
    step = Step()
    x = step.parameter()
    for block in range(8):
        at = f"net.{block}"
        a = step.op(x, makes=(64,), saves="nothing", path=at)
        b, c = (step.op(a, makes=(8,), saves="nothing", path=at) for _ in range(2))
        y = step.op(b, c, makes=(100,), path=at)
        x = step.op(y, makes=(4,), saves="nothing", path=at)
    graph = step.graph()
    costs = unit_costs(graph)

    knowing = [solve(graph, costs, budget).predicted_step_ms for budget in (240, 228, 204, 192)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "ALL_BURSTS_SIZE", 0)
        learning = [solve(graph, costs, budget).predicted_step_ms for budget in (240, 228, 204, 192)]

    assert learning == knowing == [82.0, 83.0, 89.0, 92.0]


# The decoder: groups, segments, windows


@pytest.fixture(scope="module")
def small_decoder():
    graph = decoder(layers=4)
    return graph, decoder_costs(graph)


def test_exact_is_at_least_as_fast_as_each_classic_at_that_ones_peak(small_decoder):
    graph, costs = small_decoder

    for method in set(METHODS) - {"exact", *BUDGETED}:
        classic = solve(graph, costs, method=method)
        plan = solve(graph, costs, classic.predicted_peak_bytes)
        assert plan.predicted_peak_bytes <= classic.predicted_peak_bytes
        assert plan.predicted_step_ms <= classic.predicted_step_ms


def test_exact_takes_a_classic_that_is_faster_than_what_its_models_find(small_decoder, monkeypatch):
    graph, costs = small_decoder
    budget_bytes = solve(graph, costs, method="none").predicted_peak_bytes - 1
    fitting = [e for e in ExactSearch(SearchContext(graph, costs)).published if e.peak_bytes <= budget_bytes]
    slowest = max(fitting, key=lambda e: e.timeline.step_ms)
    monkeypatch.setattr(ExactSearch, "fastest", lambda self, budget_bytes: SearchResult(slowest, False, 0.0))
    monkeypatch.setattr(SearchContext, "save_what_fits", lambda self, evaluated, budget_bytes: evaluated)

    fastest_ms = min(e.timeline.step_ms for e in fitting)
    assert solve(graph, costs, budget_bytes).predicted_step_ms == fastest_ms < slowest.timeline.step_ms


@pytest.mark.parametrize("fraction", (0.7, 0.45, 0.36, 0.3))
def test_a_decoder_fits_a_fraction_of_its_activation_memory_within_a_percent_of_what_was_searched(
    small_decoder, fraction
):
    graph, costs = small_decoder

    plan = solve(graph, costs, f"{100 * fraction}%")

    assert plan.predicted_fraction <= fraction
    assert plan.status == "optimal" and plan.gap >= 0
    assert plan.predicted_step_ms <= 1.01 * float(plan.provenance["search_bound"].split()[0])


def test_the_same_problem_gets_the_same_plan(small_decoder):
    graph, costs = small_decoder

    first, second = solve(graph, costs, "40%"), solve(graph, costs, "40%")

    assert first.decisions == second.decisions and first.bound_ms == second.bound_ms


def test_nothing_is_recomputed_that_the_budget_has_room_for(small_decoder):
    graph, costs = small_decoder
    search = ExactSearch(SearchContext(graph, costs))
    wasteful = search.context.evaluate(full(graph))
    budget = graph.resident_bytes + 2 * (wasteful.peak_bytes - graph.resident_bytes)

    thrifty = search.context.save_what_fits(wasteful, budget)

    assert thrifty.peak_bytes <= budget and thrifty.timeline.step_ms < wasteful.timeline.step_ms
    dropped = [s for s, action in thrifty.actions.items() if action == RECOMPUTE and s in graph.stored]
    kept = [s for s, action in thrifty.actions.items() if action == SAVE and s not in graph.stored]
    for storage in dropped:
        one_fewer = search.context.evaluate(complete_actions(graph, [s for s in dropped if s != storage], kept))
        assert one_fewer.peak_bytes > budget or one_fewer.timeline.step_ms >= thrifty.timeline.step_ms


def test_a_flat_sequential_comes_down_to_square_root_memory():
    depth, size = 48, 64
    graph = linear_tanh(depth, size)
    costs = unit_costs(graph)

    plan = solve(graph, costs, int(2 * math.sqrt(depth) * size))

    assert simulate(graph, costs, {}).peak_bytes > depth * size
    assert plan.predicted_peak_bytes <= 2 * math.sqrt(depth) * size
    assert plan.predicted_step_ms <= 2 * len(graph.forward_ops) + len(graph.forward_ops)


def test_an_impossible_budget_says_what_would_do():
    step = Step(resident=100)
    x = step.op(step.parameter(), makes=(50,), path="net.0", name="mm")
    step.op(x, makes=(20,), path="net.1", name="relu")
    graph = step.graph()

    with pytest.raises(BudgetInfeasibleError) as caught:
        solve(graph, unit_costs(graph), 120)

    assert str(caught.value) == (
        "no plan fits budget=120 B: every plan needs at least 200 B (200 bytes).\n"
        "  parameters  100 B\n"
        "  bottleneck  net.1 (aten.relu_backward.default, backward)\n"
        "What the leanest holds besides at its peak:\n"
        "        100 B  net.*\n"
        "Raise the budget to 200 bytes or more, or reduce the batch."
    )


def test_a_classic_is_held_to_a_budget_that_it_is_given(small_decoder):
    graph, costs = small_decoder
    need = solve(graph, costs, method="full").predicted_peak_bytes

    with pytest.raises(BudgetInfeasibleError) as caught:
        solve(graph, costs, need - 1, method="full")

    assert caught.value.least_bytes == need
    assert str(caught.value).endswith(f'Raise the budget to {need} bytes or more, or use method="exact".')
    assert solve(graph, costs, need, method="full").predicted_peak_bytes == need


# The classics


def actions(graph, plan):
    return {d.storage: (d.action, layers(graph).get(graph.storages[d.storage].op)) for d in plan.decisions}


def test_none_saves_everything(small_decoder):
    graph, costs = small_decoder
    plan = solve(graph, costs, method="none")

    assert plan.keeps_everything and plan.predicted_overhead == 0
    assert {d.storage for d in plan.decisions} == graph.stored


def test_full_keeps_what_enters_each_layer_and_runs_no_op_twice(small_decoder):
    graph, costs = small_decoder
    plan = solve(graph, costs, method="full")

    kept_inside = [s for s, (action, layer) in actions(graph, plan).items() if action == SAVE and layer is not None]
    assert len(kept_inside) == 4  # the output of each of the four layers, all read elsewhere
    assert all(graph.ops[graph.storages[s].op].name == "aten.add.default" for s in kept_inside)
    again = [r.op for r in simulate(graph, costs, plan).replays]
    assert len(again) == len(set(again))


def test_every_n_checkpoints_layers_0_n_2n(small_decoder):
    graph, costs = small_decoder
    for n, expected in ((1, {0, 1, 2, 3}), (2, {0, 2}), (3, {0, 3}), (4, {0})):
        plan = solve(graph, costs, method="every_n", n=n)
        assert {layer for action, layer in actions(graph, plan).values() if action == RECOMPUTE} == expected
    assert solve(graph, costs, method="every_n").decisions == solve(graph, costs, method="every_n", n=2).decisions


def test_sqrt_n_keeps_what_crosses_two_segments_of_two_layers(small_decoder):
    graph, costs = small_decoder
    plan = solve(graph, costs, method="sqrt_n")

    kept_inside = [layer for action, layer in actions(graph, plan).values() if action == SAVE and layer is not None]
    assert kept_inside == [1, 3]


def test_sqrt_n_of_a_chain_needs_about_twice_the_square_root():
    graph = chain(length=64, size=1)
    costs = unit_costs(graph)
    plan = solve(graph, costs, method="sqrt_n")

    assert simulate(graph, costs, {}).peak_bytes == 64  # 63 stored, and a gradient
    assert plan.predicted_peak_bytes <= 2 * 8 + 2
    assert plan.counts[SAVE] == 7


def test_selective_replays_no_matrix_product_and_no_attention(small_decoder):
    graph, costs = small_decoder
    line = simulate(graph, costs, solve(graph, costs, method="selective"))

    assert {graph.ops[r.op].name for r in line.replays} == {
        "aten.rms_norm.default", "aten.rope.default", "aten.silu.default", "aten.mul.default", "aten.add.default",
    }  # fmt: skip


def test_layers_are_the_entries_of_the_outermost_container_that_repeats(small_decoder):
    graph, _ = small_decoder
    numbers = layers(graph)

    assert {graph.scope(graph.ops[op]).split(".")[2] for op, layer in numbers.items() if layer == 2} == {"2"}
    outside = {graph.scope(op) for op in graph.forward_ops if op.id not in numbers}
    assert outside == {"", "model.embed", "lm_head"}


# The front door


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"method": "best"},
            ValueError,
            "method='best' is not known. Use one of exact, none, full, every_n, sqrt_n, selective, revolve, rotor, "
            "knapsack.",
        ),
        ({"budget": None}, ValueError, 'budget=None: method="exact" needs one. Pass bytes, "6GiB" or "40%".'),
        (
            {"budget": "auto"},
            ValueError,
            'budget=\'auto\' depends on the device. Pass bytes, "6GiB" or "40%" to solve.',
        ),
        (
            {"n": 2},
            ValueError,
            'n=2 has no meaning for method=\'exact\'. Leave it out, or use method="every_n" or "revolve".',
        ),
        (
            {"ratio": 0.5},
            ValueError,
            "ratio=0.5 has no meaning for method='exact'. Leave it out, or use method=\"knapsack\".",
        ),
        (
            {"method": "every_n", "n": 0},
            ValueError,
            "n=0 is not a positive int. Write n=2 to checkpoint every second layer.",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(small_decoder, options, error, message):
    graph, costs = small_decoder
    with pytest.raises(error) as caught:
        solve(graph, costs, **{"budget": "50%", **options})
    assert str(caught.value) == message


def test_methods_for_layers_say_so_where_none_repeats():
    graph = chain(5)
    with pytest.raises(ValueError) as caught:
        solve(graph, unit_costs(graph), method="full")
    assert str(caught.value) == ("method='full' needs repeated layers and this model has none. Use method=\"exact\".")


def test_costs_of_another_graph_are_refused():
    with pytest.raises(ValueError) as caught:
        solve(chain(3), unit_costs(chain(4)), "50%")
    assert str(caught.value) == "costs has times for 8 ops, the graph has 6 ops. Measure this graph."


def test_a_budget_in_percent_counts_from_what_is_resident(small_decoder):
    graph, costs = small_decoder
    plan = solve(graph, costs, "80%")

    assert plan.resident_bytes == graph.resident_bytes == 1000
    assert plan.budget_bytes == 1000 + int(0.8 * (plan.plain_peak_bytes - 1000))


def test_a_candidate_above_its_budget_becomes_no_plan():
    graph = chain(4)
    plain = simulate(graph, unit_costs(graph), {}).peak_bytes

    with pytest.raises(LowtideError, match=f"'exact' came with a plan of {plain} bytes for a budget of {plain - 1}"):
        build_plan(SearchContext(graph, unit_costs(graph)), Candidate({}), method="exact", budget_bytes=plain - 1)
