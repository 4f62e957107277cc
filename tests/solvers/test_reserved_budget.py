"""Budgets of reserved memory: what a plan reserves is held to them, and what cannot be is said."""

from dataclasses import replace

import pytest
from support.case_graphs import load_case
from support.plan_transfer import plan_for
from support.quick import thorough_but

from lowtide.errors import BudgetInfeasibleError, PlanMismatchError
from lowtide.plan import Plan
from lowtide.planning.plan_cache import PlanCache
from lowtide.planning.plan_request import PlanRequest
from lowtide.reports.summary import facts, warnings
from lowtide.simulation.simulator import simulate
from lowtide.solvers.dispatch import solve

MIB = 1 << 20


@pytest.fixture(autouse=True)
def default_settings(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


@pytest.fixture(scope="module")
def step():
    """A step on a device with a caching allocator."""
    graph, costs = load_case("decoder8_512")
    return replace(graph, device="standin"), costs


def reserved(step, **options):
    return solve(*step, budget_kind="reserved", gap=0.05, **options)


@pytest.fixture(scope="module")
def plan(step):
    return reserved(step, budget=600 * MIB)


def test_a_plan_reserves_no_more_than_its_budget(step, plan):
    graph, costs = step
    budget = 600 * MIB

    allocated = solve(graph, costs, budget, gap=0.05)

    assert allocated.predicted_peak_bytes <= budget < allocated.predicted_reserved_peak_bytes
    assert plan.predicted_reserved_peak_bytes <= budget
    assert plan.predicted_reserved_peak_bytes == simulate(graph, costs, plan).reserved_peak_bytes
    assert (plan.budget_bytes, plan.budget_kind, plan.budgeted_peak_bytes) == (
        budget, "reserved", plan.predicted_reserved_peak_bytes,
    )  # fmt: skip
    assert plan.bound_ms <= allocated.bound_ms * (1 + 1e-9)  # it holds for the plans of both kinds
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("share", thorough_but(("60%",), ["60%", "85%"]))
def test_a_budget_of_allocated_bytes_is_held_as_the_device_counts_them(step, monkeypatch, share):
    graph, costs = step
    plan = solve(graph, costs, share, gap=0.05)
    assert plan.predicted_peak_bytes < plan.predicted_counted_peak_bytes <= plan.budget_bytes
    assert plan.predicted_counted_peak_bytes == simulate(graph, costs, plan).counted_peak_bytes
    assert plan.status == "feasible"  # the search was for fewer bytes

    monkeypatch.setattr("lowtide.solvers.dispatch.within_counted", lambda context, budget, within: within(budget))
    unheld = solve(graph, costs, share, gap=0.05)
    assert unheld.predicted_peak_bytes <= unheld.budget_bytes < unheld.predicted_counted_peak_bytes


def test_blocks_over_a_budget_that_leaves_no_choice_are_told(step):
    graph, costs = step
    least = solve(graph, costs, method="full").predicted_peak_bytes
    plan = solve(graph, costs, least, method="full")
    over = (plan.predicted_counted_peak_bytes - least) / MIB

    assert over > 0
    assert f"The device counts {over:.2f} MiB more than the budget" in warnings(plan)[0]
    assert f"by the device: {over:.2f} MiB more, in blocks not full" in str(plan.explain())
    assert dict(facts(plan, None, None))["device counts"].endswith(f"{over:.2f} MiB of it in blocks that are not full")


def test_segments_that_grow_count_what_was_asked_for(step, monkeypatch):
    graph, costs = step
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    plan = solve(graph, costs, "60%", method="knapsack")
    assert abs(plan.predicted_counted_peak_bytes - plan.predicted_peak_bytes) < 512 * len(graph.storages)
    assert plan.predicted_counted_peak_bytes <= plan.budget_bytes


def test_what_fits_plain_is_left_alone(step):
    graph, costs = step
    plain = simulate(graph, costs, {}).reserved_peak_bytes

    assert reserved(step, budget=plain).keeps_everything
    assert not reserved(step, budget=plain - 1).keeps_everything


@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param("toy", {"method": "exact"}, marks=pytest.mark.slow),
        ("decoder8_512", {"method": "every_n", "n": 3}),
        ("unet", {"method": "knapsack"}),
    ],
)
def test_the_least_that_an_error_names_succeeds_and_a_byte_less_does_not(case, options):
    graph, costs = load_case(case)
    graph = replace(graph, device="standin")

    def solved(budget):
        return solve(graph, costs, budget, budget_kind="reserved", **options)

    with pytest.raises(BudgetInfeasibleError) as error:
        solved(graph.resident_bytes + MIB)
    least = error.value.least_bytes

    assert solved(least).predicted_reserved_peak_bytes <= least
    with pytest.raises(BudgetInfeasibleError) as error:
        solved(least - 1)
    assert error.value.least_bytes == least


def test_the_error_says_what_is_reserved_and_the_way_out(step):
    graph, costs = step
    with pytest.raises(BudgetInfeasibleError) as error:
        solve(graph, costs, 250 * MIB, budget_kind="reserved", method="full")
    least = error.value.least_bytes
    full = solve(graph, costs, method="full")

    assert least == full.predicted_reserved_peak_bytes
    assert str(error.value) == (
        f"no plan found fits budget=250.00 MiB of reserved memory: the leanest reserves {least / MIB:.2f} MiB "
        f"({least} bytes).\n"
        f"  allocated at its peak    {full.predicted_peak_bytes / MIB:.2f} MiB\n"
        f"  in segments not full     {(least - full.predicted_peak_bytes) / MIB:.2f} MiB\n"
        f"Raise the budget to {least} bytes or more, reduce the batch, or let segments grow: "
        "PYTORCH_ALLOC_CONF=expandable_segments:True."
    )


def test_below_what_is_resident_the_error_still_knows_the_least_that_is_reserved(step):
    graph, costs = step
    with pytest.raises(BudgetInfeasibleError, match="live through the whole step") as error:
        solve(graph, costs, 50 * MIB, budget_kind="reserved", method="full")

    assert error.value.least_bytes == solve(graph, costs, method="full").predicted_reserved_peak_bytes


def test_segments_that_grow_reserve_less(step, monkeypatch):
    graph, costs = step
    fixed = simulate(graph, costs, {}).reserved_peak_bytes
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")

    assert simulate(graph, costs, {}).reserved_peak_bytes < fixed


@pytest.mark.parametrize(
    ("device", "settings", "budget", "kind", "message"),
    [
        (
            "cpu", "", "1GiB", "reserved",
            "budget_kind='reserved' has no meaning here: memory of device 'cpu' does not come from a caching allocator "
            "as modelled here. Use 'allocated'.",
        ),
        (
            "standin", "max_split_size_mb:64", "1GiB", "reserved",
            "budget_kind='reserved' has no meaning here: PYTORCH_ALLOC_CONF sets something else than "
            "expandable_segments, which is not modelled. Use 'allocated'.",
        ),
        (
            "standin", "", "40%", "reserved",
            "budget='40%' is no number of reserved bytes, which budget_kind='reserved' needs. Pass bytes or \"6GiB\".",
        ),
        (
            "standin", "", "1GiB", "reserve",
            "budget_kind='reserve' is not known. Did you mean 'reserved'? Use 'allocated' or 'reserved'.",
        ),
    ],
)  # fmt: skip
def test_a_budget_without_a_meaning_is_refused(step, monkeypatch, device, settings, budget, kind, message):
    graph, costs = step
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)

    with pytest.raises(ValueError) as error:
        solve(replace(graph, device=device), costs, budget, budget_kind=kind)
    assert str(error.value) == message


def test_where_nothing_is_reserved_none_is_predicted():
    graph, costs = load_case("toy")

    assert simulate(graph, costs, {}).reserved_peak_bytes is None
    plan = solve(graph, costs, "60%", method="knapsack")
    assert plan.predicted_reserved_peak_bytes is plan.predicted_counted_peak_bytes is None
    assert "reserved" not in str(plan.explain()) and "counted" not in str(plan.explain())


def test_plans_tell_what_they_reserve(step):
    plan = solve(*step, method="full")
    more = (plan.predicted_reserved_peak_bytes - plan.predicted_peak_bytes) / MIB

    whole = f"{plan.predicted_reserved_peak_bytes / MIB:.2f} MiB"
    line = f"reserved {whole}: {more:.2f} MiB more, in segments that are not full"
    assert line in str(plan.explain()).splitlines()


def test_a_plan_carried_over_is_held_to_what_it_reserves(step, plan):
    graph, costs = step
    assert plan_for(graph, costs, plan).budget_kind == "reserved"

    between = (plan.predicted_peak_bytes + plan.predicted_reserved_peak_bytes) // 2
    with pytest.raises(PlanMismatchError, match="would need"):
        plan_for(graph, costs, replace(plan, budget_bytes=between))


def test_a_cached_plan_is_for_its_kind_of_budget_and_the_segments_it_was_made_for(step, plan, tmp_path, monkeypatch):
    graph, costs = step
    cache = PlanCache(tmp_path)
    asked = PlanRequest(graph, costs, 600 * MIB, options={"budget_kind": "reserved"})
    cache.keep(asked, plan)

    assert cache.find(asked).plan == plan
    assert cache.find(replace(asked, options={})).plan is None
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert cache.find(asked).plan is None
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    cache.keep(asked, replace(plan, budget_bytes=plan.predicted_peak_bytes))
    assert "its peak is" in cache.find(asked).reason
