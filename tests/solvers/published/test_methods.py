"""Revolve, rotor and the knapsack on step graphs: what becomes of their plans, and the exact method beside them."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples
from support.strategies import small_graphs
from support.toy_graphs import Step, chain, decoder, decoder_costs, unit_costs

from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.costs import Costs
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.simulation.simulator import simulate, simulate_actions
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.dispatch import solve
from lowtide.solvers.published.chain import CK, EMPTY, StepChain
from lowtide.solvers.published.knapsack import dp_knapsack, greedy_knapsack, ilp_knapsack
from lowtide.solvers.published.methods import BUDGETED, PUBLISHED, lazy_candidates
from lowtide.solvers.published.revolve import extra_steps, revolve_schedule
from lowtide.solvers.published.rotor import _enough_bytes, tabulate
from lowtide.solvers.search_context import SearchContext


def ladder(layers, width=10, inner=40):
    """Layers of two ops: ``f`` widens, ``g`` narrows and stores what it reads. No layer stores its input."""
    step = Step(resident=100)
    x = step.op(step.parameter(), makes=(width,), saves="nothing", name="embedding")
    for i in range(layers):
        h = step.op(x, makes=(inner,), saves="nothing", path=f"net.{i}", name="f")
        x = step.op(h, makes=(width,), path=f"net.{i}", name="g")
    step.op(x, makes=(1,), name="loss")
    return step.graph()


@st.composite
def layered_cases(draw):
    """Two to four layers of one to three ops, with shared inputs, skips, fixed values and workspace."""
    step = Step(resident=draw(st.sampled_from([0, 5])))
    parameter = step.parameter()
    made = [step.op(parameter, makes=(draw(st.integers(1, 6)),), saves="nothing")]
    for i in range(draw(st.integers(2, 4))):
        for _ in range(draw(st.integers(1, 3))):
            reads = {made[-1], draw(st.sampled_from(made[-3:]))}
            stored = draw(st.lists(st.booleans(), min_size=3, max_size=3))
            made.append(
                step.op(
                    *sorted(reads),
                    makes=(draw(st.integers(1, 12)),),
                    saves=lambda out, reads=reads, stored=stored: [
                        s for s, yes in zip((*sorted(reads), *out), stored) if yes
                    ],
                    path=f"net.{i}",
                    fixed=draw(st.sampled_from(["", "", "", "", "", "written in place"])),
                    workspace=draw(st.sampled_from([0, 0, 3])),
                )
            )
    step.op(made[-1], makes=(1,))
    graph = step.graph(backward_workspace=draw(st.sampled_from([0, 4])))
    times = tuple(float(draw(st.integers(1, 9))) for _ in graph.ops)
    return graph, Costs(op_ms=times, dispatch_us=draw(st.sampled_from([0.0, 1000.0])))


@pytest.fixture(scope="module")
def small_decoder():
    graph = decoder(layers=4)
    return graph, decoder_costs(graph)


# Chains read off graphs


def test_a_stage_has_the_times_and_bytes_of_its_layer():
    graph = ladder(3, width=10, inner=40)
    chain_ = StepChain(SearchContext(graph, unit_costs(graph)), "rotor")
    head, first, second, last, tail = chain_.stages()

    assert list(chain_.layers) == [1, 2, 3]
    assert second == last
    # F_∅ holds its input, h and its output; F_all keeps h and the output.
    assert (first.forward_ms, first.output_bytes, first.saved_bytes, first.run_overhead_bytes) == (2.0, 10, 50, 40)
    # δ is the gradient of the output; backward makes that of h, 40 bytes, beside it, then that of the input.
    assert (second.backward_ms, second.gradient_bytes, second.backward_overhead_bytes) == (2.0, 10, 40)
    assert (head.forward_ms, head.output_bytes, head.saved_bytes) == (1.0, 10, 10)
    assert (tail.forward_ms, tail.output_bytes, tail.saved_bytes) == (1.0, 0, 0)
    # The embedding stores nothing, so that its backward follows the first layer's.
    assert first.backward_ms == 3.0 and head.backward_ms == 0.0


def test_what_skips_a_layer_is_kept_in_every_plan():
    step = Step()
    mask = step.op(step.parameter(), makes=(7,), saves="nothing")
    x = step.op(step.parameter(), makes=(10,), saves="nothing")
    for i in range(3):
        x = step.op(x, mask, makes=(10,), path=f"net.{i}")
    graph = step.graph()

    assert mask in StepChain(SearchContext(graph, unit_costs(graph)), "rotor").kept
    for method in ("revolve", "rotor"):
        for lazy in lazy_candidates(SearchContext(graph, unit_costs(graph)), method):
            assert lazy.candidate().actions.get(mask, SAVE) == SAVE


@pytest.mark.parametrize("case", ("ladder", "decoder"))
def test_a_chain_promises_no_less_memory_and_time_than_the_step_takes(case, small_decoder):
    graph, costs = small_decoder if case == "decoder" else (ladder(6), unit_costs(ladder(6)))
    step_chain = StepChain(SearchContext(graph, costs), "rotor")
    stages = step_chain.stages()
    unit = max(_enough_bytes(stages) // 400, 1)
    table = tabulate(stages, 420, unit)
    base = graph.resident_bytes + sum(graph.storages[s].bytes for s in step_chain.kept & graph.stored)

    promised = 0
    for units in range(421):
        if table.time_ms[0, -1, units] < float("inf"):
            promised += 1
            candidate = step_chain.carry_out(table.schedule(units))
            line = simulate_actions(graph, costs, candidate.actions, candidate.replays)
            assert line.peak_bytes <= base + units * unit
            tape_ms = line.recompute_ms - sum(costs.op_ms[r.op] for r in line.replays)
            assert line.step_ms - tape_ms <= table.time_ms[0, -1, units] + 1e-9
    assert promised > 50


@settings(max_examples=examples(40), deadline=None)
@given(case=layered_cases())
def test_a_candidate_is_carried_out_within_its_time_and_not_below_its_floor(case):
    graph, costs = case

    for method in PUBLISHED:
        try:
            found = lazy_candidates(SearchContext(graph, costs), method)
        except ValueError:  # one layer holds most of the ops
            continue
        for lazy in found:
            candidate = lazy.candidate()
            line = simulate_actions(graph, costs, candidate.actions, candidate.replays)
            assert line.peak_bytes >= lazy.floor_bytes
            if method in BUDGETED:
                assert line.step_ms <= lazy.step_ms + 1e-9
            plan = build_plan(SearchContext(graph, costs), candidate, method=method)
            assert simulate(graph, costs, plan) == line


# Revolve


@pytest.mark.parametrize("layers", (2, 5, 10, 13))
def test_revolve_replays_as_often_as_the_closed_form_says(layers):
    graph = ladder(layers)
    costs = unit_costs(graph)

    for n in range(1, layers):
        plan = solve(graph, costs, method="revolve", n=n)
        replays = Counter(graph.ops[r.op].name for r in simulate(graph, costs, plan).replays)
        # The last layer is not replayed. The others are once for their own backward, which g is not needed for.
        for_inputs = extra_steps(layers, n) - (layers - 1)
        assert replays == +Counter({"aten.g.default": for_inputs, "aten.f.default": for_inputs + layers - 1})


def test_revolve_replays_each_layer_as_often_as_its_schedule():
    graph = ladder(10)
    plan = solve(graph, unit_costs(graph), method="revolve", n=3)

    again = Counter(step.stage for step in revolve_schedule(10, 3) if step.kind in (CK, EMPTY))
    expected = {layer: again[layer] for layer in range(10)}  # the forward pass, less its run, plus one for backward
    counts = {
        int(plan.scope(d).split(".")[1]): d.replays
        for d in plan.decisions
        if d.action == RECOMPUTE and plan.ops[d.op].name == "aten.f.default"
    }
    assert counts == {layer: often for layer, often in expected.items() if layer < 9}


def test_each_snapshot_of_revolve_costs_one_layer_input():
    graph = ladder(12, width=10, inner=40)
    costs = unit_costs(graph)

    peaks = [solve(graph, costs, method="revolve", n=n).predicted_peak_bytes for n in range(1, 12)]

    # In the backward of the last layer: the snapshots, h, and the gradients of the output and of h.
    assert peaks == [100 + 10 * n + 40 + 10 + 40 for n in range(1, 12)]


def test_revolve_takes_the_most_snapshots_that_fit():
    graph = ladder(12)
    costs = unit_costs(graph)
    by_n = {n: solve(graph, costs, method="revolve", n=n) for n in range(1, 12)}

    for n, plan in by_n.items():
        fitted = solve(graph, costs, plan.predicted_peak_bytes, method="revolve")
        assert fitted.predicted_peak_bytes <= plan.predicted_peak_bytes
        assert fitted.predicted_step_ms <= plan.predicted_step_ms, n


# Rotor


@pytest.mark.parametrize(("budget", "expected"), [("80%", {3, 4}), ("70%", {1, 3, 4}), ("60%", {1, 2, 3, 4})])
def test_rotor_recomputes_cheap_layers_before_dear_ones(budget, expected):
    graph = ladder(6)
    dear = {op.id for op in graph.ops if graph.scope(op) in ("net.0", "net.2")}
    costs = Costs(op_ms=tuple(10.0 if op.id in dear else 1.0 for op in graph.ops))

    plan = solve(graph, costs, budget, method="rotor")

    again = {plan.scope(d) for d in plan.decisions if d.action == RECOMPUTE and d.stored}
    assert again == {f"net.{layer}" for layer in expected}


# The knapsack


def best_value(weights, values, capacity):
    subsets = itertools.product((False, True), repeat=len(values))
    fitting = [s for s in subsets if sum(w for w, yes in zip(weights, s) if yes) <= capacity]
    return max(sum(v for v, yes in zip(values, s) if yes) for s in fitting)


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_dp_and_ilp_find_the_best_and_greedy_stays_within_the_capacity(data):
    count = data.draw(st.integers(1, 8))
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    weights = [size / 100 for size in sizes]  # exact when rounded to 1/10000
    values = [float(v) for v in data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))]
    units = data.draw(st.integers(0, 100))

    best = best_value(sizes, values, units)

    for kept in (dp_knapsack(weights, values, [units / 100])[0], ilp_knapsack(weights, values, units / 100)):
        assert sum(values[i] for i in kept) == pytest.approx(best)
        assert sum(sizes[i] for i in kept) <= units
    kept = greedy_knapsack(weights, values, units / 100)
    assert sum(values[i] for i in kept) <= best and sum(weights[i] for i in kept) <= units / 100 + 1e-9


def test_one_table_answers_for_every_capacity():
    weights, values = [0.3, 0.25, 0.2, 0.15, 0.1], [5.0, 4.0, 4.0, 2.0, 1.0]
    capacities = (0.0, 0.1, 0.35, 0.5, 0.9, 1.0)

    together = dp_knapsack(weights, values, capacities)

    assert together == [dp_knapsack(weights, values, [capacity])[0] for capacity in capacities]
    assert together[0] == [] and together[-1] == [0, 1, 2, 3, 4]


def test_rounding_overfills_the_knapsack():
    """A known weakness of PyTorch's dp: 5000 items of less than 1/20000 weigh nothing."""
    assert len(dp_knapsack([0.24 / 5000] * 5000, [1.0] * 5000, [0.01])[0]) == 5000


def test_the_ratio_bounds_the_kept_bytes(small_decoder):
    graph, costs = small_decoder
    stored = sum(graph.storages[s].bytes for s in graph.stored)

    for ratio in (1.0, 0.75, 0.5, 0.25, 0.0):
        plan = solve(graph, costs, method="knapsack", ratio=ratio)
        kept = plan.bytes_by_action[SAVE]
        assert kept <= (ratio + 0.01) * stored
        assert ratio not in (0, 1) or kept == ratio * stored


def test_the_peak_of_the_knapsack_may_rise_as_its_ratio_falls(small_decoder):
    """A known weakness: the less is kept, the longer the chains that come back at once."""
    graph, costs = small_decoder

    peaks = [
        solve(graph, costs, method="knapsack", ratio=ratio).predicted_fraction for ratio in (1.0, 0.5, 0.25, 0.1, 0.0)
    ]

    assert peaks[0] > peaks[1] > peaks[2] and peaks[-1] > peaks[2]


def test_the_knapsack_keeps_what_is_dearest_for_its_bytes(small_decoder):
    graph, costs = small_decoder
    plan = solve(graph, costs, "75%", method="knapsack")

    again = {plan.ops[d.op].name for d in plan.decisions if d.action == RECOMPUTE and d.stored}
    assert again == {"aten.silu.default", "aten.mul.default", "aten.rms_norm.default"}


# The front door


@pytest.mark.parametrize("method", ("revolve", "rotor", "knapsack"))
def test_a_budget_below_the_least_says_what_would_do_and_that_succeeds(method, small_decoder):
    graph, costs = small_decoder
    with pytest.raises(BudgetInfeasibleError) as caught:
        solve(graph, costs, graph.resident_bytes + 1, method=method)

    least = caught.value.least_bytes
    assert f"method={method!r} needs at least" in str(caught.value)
    assert str(caught.value).endswith(f'Raise the budget to {least} bytes or more, or use method="exact".')
    assert solve(graph, costs, least, method=method).predicted_peak_bytes == least
    with pytest.raises(BudgetInfeasibleError) as again:
        solve(graph, costs, least - 1, method=method)
    assert again.value.least_bytes == least


@pytest.mark.parametrize("method", sorted(BUDGETED))
def test_more_budget_never_costs_more_time(method, small_decoder):
    graph, costs = small_decoder
    times = []
    for percent in range(30, 101, 10):
        try:
            times.append(solve(graph, costs, f"{percent}%", method=method).predicted_step_ms)
        except BudgetInfeasibleError:
            assert not times
    assert times == sorted(times, reverse=True) and len(times) > 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "rotor"}, 'budget=None: method="rotor" needs one. Pass bytes, "6GiB" or "40%".'),
        ({"method": "revolve"}, 'budget=None: method="revolve" needs one. Pass bytes, "6GiB" or "40%", or n=.'),
        ({"method": "knapsack"}, 'budget=None: method="knapsack" needs one. Pass bytes, "6GiB" or "40%", or ratio=.'),
        (
            {"method": "revolve", "n": 0},
            "n=0 is not a positive int. Write n=3 to hold three layer inputs at a time.",
        ),
        (
            {"method": "knapsack", "ratio": 1.5},
            "ratio=1.5 is not a share. Write ratio=0.5 to keep half of the stored bytes.",
        ),
        (
            {"method": "rotor", "n": 2, "budget": "50%"},
            'n=2 has no meaning for method=\'rotor\'. Leave it out, or use method="every_n" or "revolve".',
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message, small_decoder):
    graph, costs = small_decoder
    with pytest.raises(ValueError) as caught:
        solve(graph, costs, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize("method", ("revolve", "rotor"))
def test_methods_for_layers_say_so_where_none_repeats(method):
    graph = chain(5)
    with pytest.raises(ValueError) as caught:
        solve(graph, unit_costs(graph), "90%", method=method)
    assert str(caught.value) == (
        f'method={method!r} needs repeated layers and this model has none. Use method="exact".'
    )


# The exact method beside them


def slower_than(graph, costs, budget, methods):
    """Classics that beat exact within ``budget``, of those whose plan replays no op twice, as exact does."""
    exact = None
    for method in methods:
        try:
            plan = solve(graph, costs, budget, method=method)
        except (BudgetInfeasibleError, ValueError):  # it does not fit, or no layer repeats
            continue
        if max((d.replays for d in plan.decisions), default=1) == 1:
            exact = exact or solve(graph, costs, budget, gap=0.0)
            if exact.predicted_step_ms > plan.predicted_step_ms + 1e-9:
                yield method, plan.predicted_step_ms, exact.predicted_step_ms


@pytest.mark.parametrize("percent", (80, 50, 40, 34))
def test_exact_is_at_least_as_fast_as_every_classic_on_a_decoder(percent):
    graph = decoder(layers=3)

    assert list(slower_than(graph, decoder_costs(graph), f"{percent}%", PUBLISHED)) == []


@pytest.mark.parametrize("method", ["rotor", "revolve"])
def test_below_what_replaying_once_can_reach_exact_takes_their_schedules(method):
    graph = ladder(16)
    costs = unit_costs(graph)
    with pytest.raises(BudgetInfeasibleError) as least:
        solve(graph, costs, 1, method=method)

    theirs = solve(graph, costs, least.value.least_bytes, method=method)
    ours = solve(graph, costs, least.value.least_bytes)

    assert max(d.replays for d in ours.decisions) > 1
    assert ours.predicted_peak_bytes <= least.value.least_bytes
    assert ours.predicted_step_ms <= theirs.predicted_step_ms


@settings(max_examples=examples(60), deadline=None)
@given(case=layered_cases(), percent=st.sampled_from([95, 80, 60, 50, 40]))
def test_exact_is_at_least_as_fast_as_every_classic_on_layers(case, percent):
    graph, costs = case

    assert list(slower_than(graph, costs, f"{percent}%", PUBLISHED)) == []


@settings(max_examples=examples(60), deadline=None)
@given(graph=small_graphs(), percent=st.sampled_from([95, 80, 60, 50]))
def test_exact_is_at_least_as_fast_as_every_classic_without_layers(graph, percent):
    if simulate(graph, unit_costs(graph), {}).peak_bytes > 1:
        assert list(slower_than(graph, unit_costs(graph), f"{percent}%", PUBLISHED)) == []


def test_the_list_of_what_beats_exact_is_not_always_empty(monkeypatch):
    graph = decoder(layers=2)
    costs = decoder_costs(graph)
    wasteful = solve(graph, costs, method="full")

    good = solve(graph, costs, "90%", method="knapsack")

    def solve_badly(graph, costs, budget, *, method="exact", **options):
        return wasteful if method == "exact" else good

    monkeypatch.setitem(globals(), "solve", solve_badly)
    assert list(slower_than(graph, costs, "90%", ("knapsack",)))
