"""The bounds hold for whatever a plan does, say enough to be useful, and fail when what is certain is got wrong."""

import math
from itertools import pairwise

import pytest
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st
from support.case_graphs import load_case
from support.oracle import oracle, random_plans
from support.quick import examples, thorough_but
from support.strategies import small_cases, small_graphs
from support.toy_graphs import Step, chain, decoder, decoder_costs, linear_tanh, unit_costs

from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.costs import Costs
from lowtide.simulation.simulator import simulate
from lowtide.solvers import tuning
from lowtide.solvers.dispatch import solve
from lowtide.solvers.lower_bound import columns, relaxation
from lowtide.solvers.lower_bound import unavoidable as unavoidable_module
from lowtide.solvers.lower_bound.bound import bound_peak, bound_time
from lowtide.solvers.lower_bound.unavoidable import Unavoidable
from lowtide.solvers.milp.highs import LinearProgram
from lowtide.solvers.search_context import SearchContext


def violations(graph, costs, found):
    """(step_ms, peak_bytes) pairs that the bounds say cannot be."""
    least = bound_peak(graph)
    wrong = [(ms, peak) for ms, peak in found if peak < least]
    for peak in sorted({peak for _, peak in found if peak > 0}):
        bound = bound_time(SearchContext(graph, costs), peak).step_ms
        wrong += [(ms, peak) for ms, other in found if other <= peak and ms < bound - 1e-9]
    return wrong


@pytest.mark.parametrize("tiny", (0, 10_000), ids=("two slots", "all stages"))
@settings(max_examples=examples(200), deadline=None)
@given(case=small_cases(), record_us=st.sampled_from([0.0, 700.0]), replay_us=st.sampled_from([0.0, 400.0]))
def test_no_plan_of_a_small_graph_beats_the_bounds(tiny, case, record_us, replay_us):
    graph, costs = case
    costs = Costs(costs.op_ms, dispatch_us=costs.dispatch_us, record_us=record_us, replay_us=replay_us)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "SLOT_PER_STAGE_SIZE", tiny)
        assert violations(graph, costs, oracle(graph, costs)) == []


@settings(max_examples=examples(100), deadline=None)
@given(graph=small_graphs(most_ops=14), data=st.data())
def test_no_random_actions_with_any_number_of_replays_beat_the_bounds(graph, data):
    costs = unit_costs(graph, record_us=300.0)

    assert violations(graph, costs, random_plans(graph, costs, data)) == []


@settings(max_examples=examples(50), deadline=None)
@given(case=small_cases())
def test_the_bound_falls_as_the_budget_grows_at_no_less_than_its_price(case):
    graph, costs = case
    peak = simulate(graph, costs, {}).peak_bytes
    assume(peak > 0)
    bounds = [bound_time(SearchContext(graph, costs), budget) for budget in range(peak + 1)]
    times = [b.step_ms for b in bounds]

    assert times == sorted(times, reverse=True) and times[-1] == costs.plain_step_ms
    assert bounds[-1].ms_per_byte == 0
    for now, more in pairwise(bounds[:-1]):  # the last step also saves the tape's watching
        if math.isfinite(now.step_ms):
            assert now.step_ms - more.step_ms <= now.ms_per_byte + 1e-6


def test_a_price_is_what_a_byte_buys():
    # Four storages of 8 bytes, each worth 1 ms, beside 8 of gradient: a byte less is an eighth of a replay more.
    graph = chain(5, size=8)
    costs = unit_costs(graph)
    plain = simulate(graph, costs, {}).peak_bytes

    bound = bound_time(SearchContext(graph, costs), plain - 8)

    assert bound.ms_per_byte == pytest.approx(1 / 8)
    assert bound_time(SearchContext(graph, costs), plain - 12).step_ms == pytest.approx(bound.step_ms + 4 / 8, abs=1e-4)


def dear_to_replay():
    """An op with 3000 bytes of workspace, asked for again while the next gradient's 2000 are there."""
    step = Step()
    x = step.op(step.parameter(), makes=(8,), saves="makes", workspace=3000)
    y = step.op(x, makes=(2000,), saves=(x,), fixed="written in place")
    step.op(y, makes=(1,), saves="reads")
    return step.graph()


def test_what_a_replay_needs_for_itself_counts(monkeypatch):
    graph = dear_to_replay()
    costs = unit_costs(graph)
    # Everything is kept: y, its gradient and x. Made again x would need 2000 + 8 + 3000.
    assert {peak for _, peak in oracle(graph, costs, most_replays=2)} == {4008, 5008}

    with_it = bound_time(SearchContext(graph, costs), 4001), bound_peak(graph)
    monkeypatch.setattr(relaxation.Relaxation, "_memory_of_replays", lambda self: None)
    again = dear_to_replay()  # nothing remembered

    assert math.isinf(with_it[0].step_ms) and math.isfinite(bound_time(SearchContext(again, costs), 4001).step_ms)
    assert bound_peak(again) == 4000 < with_it[1] <= 4008


@pytest.fixture(scope="module")
def small_decoder():
    graph = decoder(layers=4)
    return graph, decoder_costs(graph)


@pytest.mark.parametrize("budget", thorough_but(("36%",), ("70%", "50%", "36%", "30%")))
def test_exact_is_never_below_the_bound_and_near_it(small_decoder, budget):
    graph, costs = small_decoder
    plan = solve(graph, costs, budget)

    bound = bound_time(SearchContext(graph, costs), plan.budget_bytes)

    # Where a layer is a quarter of the step, what backward brings back within it weighs most.
    assert bound.step_ms <= plan.predicted_step_ms <= 1.055 * bound.step_ms


def test_no_classic_is_below_the_bound_at_its_own_peak(small_decoder):
    graph, costs = small_decoder
    least = bound_peak(graph)

    for method in ("none", "full", "every_n", "sqrt_n", "selective"):
        plan = solve(graph, costs, method=method)
        assert bound_time(SearchContext(graph, costs), plan.predicted_peak_bytes).step_ms <= plan.predicted_step_ms
        assert least <= plan.predicted_peak_bytes


def test_the_least_peak_found_is_above_the_least_that_is_proven(small_decoder):
    graph, costs = small_decoder
    with pytest.raises(BudgetInfeasibleError) as caught:
        solve(graph, costs, 1)

    assert bound_peak(graph) <= caught.value.least_bytes


def test_a_budget_below_what_is_always_there_has_no_step_time():
    graph = chain(4)
    least = bound_peak(graph)

    assert math.isinf(bound_time(SearchContext(graph, unit_costs(graph)), least - 1).step_ms)
    assert math.isfinite(bound_time(SearchContext(graph, unit_costs(graph)), least).step_ms)


def test_a_square_root_of_memory_costs_what_the_bound_says():
    graph = linear_tanh(24, 64)
    costs = unit_costs(graph)
    for fraction in (0.9, 0.7, 0.5):
        plan = solve(graph, costs, f"{100 * fraction}%")
        assert bound_time(SearchContext(graph, costs), plan.budget_bytes).step_ms <= plan.predicted_step_ms


def test_the_program_grows_with_the_step_and_not_with_its_square():
    rows = {}
    for layers in (16, 32):
        graph = decoder(layers=layers)
        costs = decoder_costs(graph)
        peak = simulate(graph, costs, {}).peak_bytes
        budget = graph.resident_bytes + (peak - graph.resident_bytes) // 3
        rows[layers] = len(relaxation.Relaxation(SearchContext(graph, costs), budget).program.row_upper)

    assert rows[16] < rows[32] < 2.2 * rows[16]


# The bound leans on these; each, got wrong, must show.


def wrong(monkeypatch, mutation):
    if mutation == "a storage that is kept lives from the start":
        truth = Unavoidable.extra_spans
        monkeypatch.setattr(
            Unavoidable, "extra_spans", lambda self, s, spans: [(0, b) for _, b in truth(self, s, spans)]
        )
    elif mutation == "what is kept counts beside what backward has out":
        monkeypatch.setattr(Unavoidable, "extra_spans", lambda self, s, spans: list(spans))
    elif mutation == "all that is stored is kept":
        truth = Unavoidable._read_lifetimes

        def all_saved(self, graph, facts, optional):
            truth(self, graph, facts, frozenset())
            floor = self.idle_bytes, self.floor_bytes
            truth(self, graph, facts, optional)
            self.idle_bytes, self.floor_bytes = floor

        monkeypatch.setattr(Unavoidable, "_read_lifetimes", all_saved)
    elif mutation == "what is freed stays a while":
        truth = unavoidable_module._union

        def longer(spans):
            spans = list(spans)
            return truth([(a, max([b, *(b_ for _, b_ in spans)])) for a, b in spans])

        monkeypatch.setattr(unavoidable_module, "_union", longer)
    elif mutation == "nothing runs before its own stage":
        monkeypatch.setattr(relaxation, "_meet", lambda found, one, other: max(one or 0, other or 0) or None)
    elif mutation == "a replay runs when memory is fullest":
        truth = relaxation.Relaxation._least_beside

        def fullest(self, op, begin, end):
            floor, own = truth(self, op, begin, end)
            return floor, own + int(self.unavoidable.floor_bytes.max()) - floor

        monkeypatch.setattr(relaxation.Relaxation, "_least_beside", fullest)
    elif mutation == "what is replayed at all is replayed at once":
        monkeypatch.setattr(columns.Columns, "slot_of", lambda self, op, stage: 0)


def fork():
    """One op's result read by two: either of them may be replayed without the other."""
    step = Step()
    x = step.op(step.parameter(), makes=(30,), saves="nothing")
    y, z = step.op(x, makes=(30,), saves="makes"), step.op(x, makes=(1,), saves="makes")
    v = step.op(y, z, makes=(80,), saves="nothing")
    step.op(v, makes=(1,), saves="nothing")
    return step.graph()


@pytest.mark.parametrize(
    "mutation",
    [
        "a storage that is kept lives from the start",
        "what is kept counts beside what backward has out",
        "all that is stored is kept",
        "what is freed stays a while",
        "nothing runs before its own stage",
        "a replay runs when memory is fullest",
        "what is replayed at all is replayed at once",
    ],
)
def test_a_wrong_idea_of_what_is_certain_is_caught(monkeypatch, mutation):
    wrong(monkeypatch, mutation)
    monkeypatch.setattr(tuning, "SLOT_PER_STAGE_SIZE", 10_000)

    @settings(max_examples=400, deadline=None, database=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
    @given(case=small_cases())
    def law(case):
        graph, costs = case
        assert violations(graph, costs, oracle(graph, costs)) == []

    law = example(case=(fork(), unit_costs(fork())))(law)
    with pytest.raises((AssertionError, ExceptionGroup)):
        law()


@pytest.mark.parametrize("name", thorough_but(("decoder8_512",), ("toy", "decoder8_512", "minilm")))
@pytest.mark.parametrize("budget", ("50%", "25%"))
def test_on_real_steps_exact_is_within_a_percent_of_it(name, budget):
    graph, costs = load_case(name)
    try:
        plan = solve(graph, costs, budget)
    except BudgetInfeasibleError as error:
        plan = solve(graph, costs, error.least_bytes)

    assert 0 <= plan.gap <= 0.01


@pytest.mark.parametrize("name", thorough_but(("chain48",), ("toy", "chain48", "autocast")))
def test_no_published_method_is_below_it_on_real_steps(name):
    graph, costs = load_case(name)
    least = bound_peak(graph)

    for method, budget in (("full", None), ("sqrt_n", None), ("selective", None), ("rotor", "25%"), ("revolve", "40%")):
        plan = solve(graph, costs, budget, method=method)
        assert least <= plan.predicted_peak_bytes
        assert bound_time(SearchContext(graph, costs), plan.predicted_peak_bytes).step_ms <= plan.predicted_step_ms


# What a plan and an error say of them


def test_in_a_small_step_every_moment_of_backward_counts(monkeypatch):
    graph, costs = load_case("vit")
    plain = simulate(graph, costs, {}).peak_bytes
    budget = graph.resident_bytes + int(0.36 * (plain - graph.resident_bytes))
    every = bound_time(SearchContext(graph, costs), budget).step_ms
    monkeypatch.setattr(tuning, "ALL_MOMENTS_OPS", 0)

    again, _ = load_case("vit")  # nothing remembered
    assert every > bound_time(SearchContext(again, costs), budget).step_ms + 0.001 * costs.plain_step_ms


def test_a_plan_carries_the_bound_of_all_plans_and_says_so(small_decoder):
    graph, costs = small_decoder
    plan, classic = solve(graph, costs, "36%"), solve(graph, costs, "90%", method="full")

    assert classic.bound_ms == bound_time(SearchContext(graph, costs), classic.budget_bytes).step_ms
    assert bound_time(SearchContext(graph, costs), plan.budget_bytes).step_ms <= plan.bound_ms <= plan.predicted_step_ms
    for made in (plan, classic):
        assert made.bound_model.startswith("every plan that saves or recomputes")
    assert plan.provenance["search_bound"].endswith(" ms for the plans that method exact looks at")
    assert classic.gap > plan.gap and "search_bound" not in classic.provenance
    assert solve(graph, costs, method="full").bound_ms is None


def test_an_impossible_budget_tells_what_is_proven_from_what_was_found(small_decoder):
    graph, costs = small_decoder
    proven = bound_peak(graph)
    with pytest.raises(BudgetInfeasibleError) as below:
        solve(graph, costs, proven - 1)
    with pytest.raises(BudgetInfeasibleError) as between:
        solve(graph, costs, proven)
    found = below.value.least_bytes

    assert proven < found == between.value.least_bytes
    assert below.value.proven_bytes == between.value.proven_bytes == proven
    assert f"every plan needs at least 118.98 KiB ({proven} bytes), the leanest found " in str(below.value)
    assert str(between.value).startswith("no plan found fits budget=118.98 KiB: the leanest needs ")
    assert f" ({found} bytes), none less than 118.98 KiB ({proven} bytes)." in str(between.value)
    assert str(between.value).endswith(f"Raise the budget to {found} bytes or more, or reduce the batch.")


# Rows that come in late


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_lazy_rows_give_the_optimum_of_all_rows(data):
    number = st.integers(-5, 5)
    columns, count = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 8))
    cost = [data.draw(number) for _ in range(columns)]
    rows = [({c: data.draw(number) for c in range(columns)}, data.draw(number)) for _ in range(count)]
    late = [data.draw(st.booleans()) for _ in rows]

    found = []
    for lazy in (False, True):
        program = LinearProgram()
        for c in cost:
            program.column(float(c))
        for (terms, upper), is_late in zip(rows, late, strict=True):
            program.row({c: float(v) for c, v in terms.items()}, upper=float(upper), lazy=lazy and is_late)
        found.append(program.relax())

    (eager, lazily) = found
    assert lazily.objective == pytest.approx(eager.objective, abs=1e-6)
    assert len(lazily.duals) == len(rows)


def test_a_large_program_may_leave_out_rows_that_hardly_matter_and_stays_a_bound(monkeypatch):
    graph = decoder(layers=4)
    costs = decoder_costs(graph)
    budget = solve(graph, costs, "40%").budget_bytes
    whole = bound_time(SearchContext(graph, costs), budget)
    monkeypatch.setattr(tuning, "LAZY_ROWS_SMALL", 0)
    monkeypatch.setattr(tuning, "LAZY_ROWS_LARGE", 0)
    monkeypatch.setattr(tuning, "LAZY_ROWS_GAIN", 0.5)

    fewer = bound_time(
        SearchContext(decoder(layers=4), costs), budget
    )  # another graph: a bound is remembered with its graph

    assert costs.plain_step_ms < fewer.step_ms < whole.step_ms


def test_lazy_rows_come_in_while_the_optimum_stands_still():
    program = LinearProgram()
    x, y, z = program.column(), program.column(), program.column(1.0)
    program.row({x: 1.0}, lower=1.0)
    program.row({y: 1.0, x: -1.0}, lower=0.0, lazy=True)
    program.row({z: 1.0, y: -1.0}, lower=0.0, lazy=True)

    assert program.relax().objective == pytest.approx(1.0)
