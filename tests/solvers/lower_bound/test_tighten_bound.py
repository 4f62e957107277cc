"""The sharper bound holds for whatever a plan does, and proves plans of few large storages nearly the fastest."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.case_graphs import load_case
from support.oracle import oracle, random_plans
from support.quick import examples, thorough_but
from support.strategies import small_cases, small_graphs
from support.toy_graphs import unit_costs

from lowtide.solvers import tuning
from lowtide.solvers.dispatch import solve
from lowtide.solvers.lower_bound import tighten_bound as tighten_bound_module
from lowtide.solvers.lower_bound.bound import bound_time
from lowtide.solvers.lower_bound.tighten_bound import tighten_bound
from lowtide.solvers.milp.highs import LinearProgram
from lowtide.solvers.search_context import SearchContext


def overruled(graph, costs, found, worse):
    """(step_ms, peak_bytes) pairs that the sharper bound says cannot be, told of plans ``worse`` times as slow."""
    wrong = []
    for budget in sorted({peak for _, peak in found if peak > 0}):
        best_ms = min(ms for ms, peak in found if peak <= budget)
        bound = bound_time(SearchContext(graph, costs), budget)
        if math.isinf(bound.step_ms):
            continue
        sharp = tighten_bound(SearchContext(graph, costs), budget, worse * best_ms, bound)
        assert sharp.step_ms >= bound.step_ms and sharp.ms_per_byte == bound.ms_per_byte
        wrong += [(best_ms, budget)] if best_ms < sharp.step_ms - 1e-6 * best_ms else []
    return wrong


@pytest.fixture
def far_from_any_plan(monkeypatch):
    """Bounds are always sharpened, and small graphs are cut into slots as large ones are."""
    monkeypatch.setattr(tuning, "SLOT_PER_STAGE_SIZE", 0)
    monkeypatch.setattr(tuning, "TIGHTEN_MAX_GAP", 100.0)
    monkeypatch.setattr(tuning, "STAGES_APART", 0)  # many slots


@pytest.mark.usefixtures("far_from_any_plan")
@pytest.mark.parametrize("worse", (1.0, 1.02, 1.5))
def test_no_plan_of_a_small_graph_beats_the_sharper_bound(worse):
    @settings(max_examples=examples(100), deadline=None)
    @given(case=small_cases())
    def holds(case):
        graph, costs = case
        assert overruled(graph, costs, oracle(graph, costs, most_replays=2), worse) == []

    holds()


@pytest.mark.usefixtures("far_from_any_plan")
def test_no_random_actions_with_any_number_of_replays_beat_the_sharper_bound():
    @settings(max_examples=examples(60), deadline=None)
    @given(graph=small_graphs(most_ops=14), data=st.data())
    def holds(graph, data):
        costs = unit_costs(graph, record_us=300.0)
        found = random_plans(graph, costs, data)
        assume(found)

        assert overruled(graph, costs, found, 1.1) == []

    holds()


@pytest.mark.parametrize(("name", "budget"), thorough_but([("unet", "36%")], [("unet", "36%"), ("vit", "full")]))
def test_plans_that_rounding_decisions_and_a_slot_too_few_left_unproven_are_within_one_percent(name, budget):
    graph, costs = load_case(name)
    asked = solve(graph, costs, method="full").predicted_peak_bytes if budget == "full" else budget
    plan = solve(graph, costs, asked)

    assert bound_time(SearchContext(graph, costs), plan.budget_bytes).step_ms < plan.predicted_step_ms / 1.01
    assert plan.gap <= 0.01

    again = tighten_bound(
        SearchContext(graph, costs),
        plan.budget_bytes,
        plan.predicted_step_ms,
        bound_time(SearchContext(graph, costs), plan.budget_bytes),
    )
    assert again.step_ms == plan.bound_ms


def test_slots_where_the_answer_breaks_them_are_what_proves_it(monkeypatch):
    graph, costs = load_case("unet")
    plan = solve(graph, costs, "36%")
    bound = bound_time(SearchContext(graph, costs), plan.budget_bytes)
    proven = tighten_bound(SearchContext(graph, costs), plan.budget_bytes, plan.predicted_step_ms, bound)
    monkeypatch.setattr(tuning, "TIGHTEN_ROUNDS", 1)

    whole = tighten_bound(SearchContext(graph, costs), plan.budget_bytes, plan.predicted_step_ms, bound)

    assert bound.step_ms <= whole.step_ms < plan.predicted_step_ms / 1.01 < proven.step_ms


def test_a_bound_that_is_near_or_hopelessly_far_is_left_alone(monkeypatch):
    graph, costs = load_case("unet")
    budget = solve(graph, costs, "36%").budget_bytes
    bound = bound_time(SearchContext(graph, costs), budget)
    monkeypatch.setattr(tighten_bound_module, "Relaxation", None)

    assert tighten_bound(SearchContext(graph, costs), budget, bound.step_ms * 1.005, bound) is bound
    assert tighten_bound(SearchContext(graph, costs), budget, bound.step_ms * 1.5, bound) is bound


def test_a_proof_stops_at_the_first_solution():
    program = LinearProgram()
    columns = [program.column(1.0 + i / 100, integer=True) for i in range(12)]
    program.row(dict.fromkeys(columns, 1.0), lower=5.5)

    def answer(**options):
        return program.minimise(gap=0.0, slack=0.0, node_limit=100, time_limit_s=math.inf, **options)

    assert answer().status == "optimal"
    first = answer(first=True)
    assert first.bound <= answer().objective <= first.objective
    program.row(dict.fromkeys(columns, 1.0), upper=5.7)
    assert answer(first=True).status == "infeasible"
