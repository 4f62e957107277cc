"""The least peak: told quickly, the same each time it is asked for, and a budget that always succeeds."""

import random
from dataclasses import replace
from itertools import compress

import pytest
from support.case_graphs import load_case
from support.quick import thorough_but
from support.toy_graphs import Step, decoder, decoder_costs

import lowtide
from lowtide.errors import BudgetInfeasibleError
from lowtide.graph.costs import Costs
from lowtide.simulation.simulator import simulate, simulate_actions
from lowtide.solvers import least_peak, search_context, tuning
from lowtide.solvers.dispatch import solve
from lowtide.solvers.exact import ExactSearch
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.local_search import descent
from lowtide.solvers.lower_bound.bound import bound_peak
from lowtide.solvers.published.methods import fixed_plans
from lowtide.solvers.search_context import SearchContext


def least_of(graph, costs, budget=1, **options):
    with pytest.raises(BudgetInfeasibleError) as caught:
        solve(graph, costs, budget, **options)
    return caught.value.least_bytes


def small_or(name):
    """A decoder of two layers in bytes, or one of the cases."""
    if name != "small":
        return load_case(name)
    graph = decoder(2)
    return graph, decoder_costs(graph)


def without_layers(num_ops):
    """Ops of random sizes that each read one or two of the last five outputs; backward reads half of all."""
    choose, step = random.Random(2), Step()
    made = [step.parameter()]
    for _ in range(num_ops):
        reads = choose.sample(made[-5:], min(len(made), choose.choice((1, 2, 2))))
        wanted = [choose.random() < 0.5 for _ in (*reads, None)]
        made.append(
            step.op(
                *reads,
                makes=(choose.randint(1, 40),),
                saves=lambda out, reads=reads, wanted=wanted: list(compress((*reads, *out), wanted)),
            )
        )
    return step.graph()


@pytest.mark.parametrize("name", thorough_but(("small",), ("small", "toy", "resnet", "chain48", "decoder8_4096")))
@pytest.mark.parametrize("time_limit_s", (30.0, 0.01), ids=("enough time", "no time"))
def test_the_least_budget_succeeds_whatever_was_asked_before_and_however_little_time_there_is(name, time_limit_s):
    graph, costs = small_or(name)
    least = least_of(graph, costs, time_limit_s=time_limit_s)

    again, other_costs = small_or(name)
    least_peak._least.clear()  # nothing remembered
    plan = solve(again, other_costs, least, time_limit_s=time_limit_s)

    assert simulate(again, other_costs, plan).peak_bytes == plan.predicted_peak_bytes <= least
    assert least_of(graph, costs, plan.resident_bytes + 1, time_limit_s=0.01) == least


def test_no_published_method_is_lower_even_where_the_search_gets_nowhere(monkeypatch):
    graph, costs = small_or("small")
    for starts in ("_starts", "_starts_of_model"):
        monkeypatch.setattr(least_peak.LeastPeakSearch, starts, lambda self: iter(()))
    least_peak._least.clear()

    published = min(plan.peak_bytes for plan in fixed_plans(SearchContext(graph, costs)))
    plain_bytes = SearchContext(graph, costs).plain.peak_bytes
    assert least_peak.LeastPeakSearch(graph).least.peak_bytes <= published < plain_bytes
    least_peak._least.clear()


@pytest.mark.parametrize(
    ("name", "tolerance"), thorough_but([("unet", 0.0)], [("resnet", 0.0), ("unet", 0.0), ("vit", 1e-3)])
)
def test_the_plan_for_the_least_needs_hardly_less(name, tolerance):
    """Nothing less where local search made both; where layers repeat, a choice of columns may come a little lower."""
    graph, costs = load_case(name)
    least = least_of(graph, costs)
    plan = solve(graph, costs, least)

    activations = plan.plain_peak_bytes - plan.resident_bytes
    assert least - tolerance * activations <= plan.predicted_peak_bytes <= least


@pytest.fixture(autouse=True)
def nothing_remembered():
    least_peak._least.clear()


@pytest.mark.parametrize("name", thorough_but(("small",), ("small", "toy", "t5")))
def test_the_least_is_the_same_whatever_ops_cost(name):
    """Told from op times, it was 5 % apart for the toy and 11 % for T5."""
    graph, costs = small_or(name)
    noise = random.Random(1)
    others = replace(costs, op_ms=tuple(ms * noise.lognormvariate(0, 0.5) for ms in costs.op_ms))
    least = least_of(graph, costs)
    least_peak._least.clear()

    assert least_of(*small_or(name), graph.resident_bytes) == least
    least_peak._least.clear()
    assert least_of(small_or(name)[0], others) == least


def test_a_graph_that_is_traced_again_is_not_searched_again(monkeypatch):
    graph, costs = load_case("unet")
    least = least_of(graph, costs)
    monkeypatch.setattr(least_peak.LeastPeakSearch, "_search", lambda self: iter(()))

    assert least_of(*load_case("unet")) == least


def test_the_search_ends_where_nothing_lower_is_possible(monkeypatch):
    graph, _ = load_case("unet")
    monkeypatch.setattr(least_peak.LeastPeakSearch, "_turned_over", lambda *_: pytest.fail("searched on"))
    least_peak._least.clear()

    assert least_peak.LeastPeakSearch(graph).least.peak_bytes == bound_peak(graph)


def test_one_model_of_a_small_step_finds_leaner_plans_than_other_starts(monkeypatch):
    graph = without_layers(30)
    least_peak._least.clear()
    least = least_peak.LeastPeakSearch(graph).least.peak_bytes
    least_peak._least.clear()
    monkeypatch.setattr(tuning, "LEAST_PEAK_MODEL_SIZE", 0)

    assert bound_peak(graph) <= least < 0.9 * least_peak.LeastPeakSearch(graph).least.peak_bytes


@pytest.mark.parametrize("name", ("unet", "chain48"))
def test_on_small_steps_the_least_found_is_the_least_there_is(name):
    graph, costs = load_case(name)
    with pytest.raises(BudgetInfeasibleError) as caught:
        solve(graph, costs, 1)

    assert caught.value.least_bytes - caught.value.proven_bytes <= 1e-3 * caught.value.least_bytes


@pytest.mark.thorough
def test_no_budget_clearly_below_the_least_of_a_decoder_has_a_plan():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4,
        attention_dropout=0.1, pad_token_id=0,
    )  # fmt: skip
    ids = torch.randint(1, 256, (4, 128))
    graph = lowtide.trace(transformers.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids})
    noise = random.Random(2)
    costs = Costs(tuple(noise.lognormvariate(-3, 1) for _ in graph.ops), 1.0, 10.0, 8.0)
    least = least_of(graph, costs)

    for share in (0.995, 0.98, 0.97):
        assert least_of(graph, costs, int(share * least)) == least


@pytest.mark.parametrize("name", thorough_but(("unet",), ("toy", "resnet", "unet", "vit")))
def test_an_impossible_budget_is_told_after_a_bounded_search(monkeypatch, name):
    """Counted in simulated events, which take the same work on every machine."""
    graph, costs = load_case(name)
    simulated = []

    def counted(graph, *arguments, **options):
        timeline = simulate_actions(graph, *arguments, **options)
        simulated.append(len(timeline.live_bytes))
        return timeline

    monkeypatch.setattr(search_context, "simulate_actions", counted)

    least_of(graph, costs)

    assert 0 < sum(simulated) <= 1.5 * tuning.LEAST_PEAK_EVENTS


@pytest.mark.parametrize(
    ("name", "percent"), thorough_but([("unet", 36.5)], [("resnet", 24.5), ("unet", 36.5), ("decoder8_512", 15.9)])
)
def test_replaying_more_often_needs_less_than_the_least_of_replaying_once(name, percent):
    """What the models alone had come down to, in percent of the plain step's activation memory."""
    graph, costs = load_case(name)
    plain = simulate_actions(graph, costs, {}).peak_bytes - graph.resident_bytes
    least = least_of(graph, costs)
    plan = solve(graph, costs, least)

    assert 100 * (least - graph.resident_bytes) / plain < percent
    assert max(d.replays for d in plan.decisions) > 1


def test_each_way_on_the_path_is_leaner_than_the_last_and_what_it_says():
    graph = decoder(4)
    costs = decoder_costs(graph)
    context = SearchContext(graph, costs)
    start = context.evaluate(complete_actions(graph, graph.stored))

    path = list(descent(context, start, events=200_000))

    peaks = [way.peak_bytes for way in path]
    assert path[0] is start and peaks == sorted(set(peaks), reverse=True) and len(path) > 3
    for way in path:
        assert simulate_actions(graph, costs, way.actions, way.replays) == way.timeline


def test_a_target_ends_the_path_and_a_price_limits_it():
    graph = decoder(4)
    costs = decoder_costs(graph)
    context = SearchContext(graph, costs)
    start = context.evaluate(complete_actions(graph, ()))
    whole = list(descent(context, start, events=200_000))
    target = whole[len(whole) // 2].peak_bytes

    part = list(descent(context, start, target_bytes=target, events=200_000))

    assert part == whole[: len(part)] and part[-1].peak_bytes <= target < part[-2].peak_bytes
    assert list(descent(context, start, max_ms_per_byte=-1.0, events=200_000)) == [start]
    assert list(descent(context, start, events=0)) == [start]


def test_the_least_does_not_depend_on_what_the_search_has_learnt():
    graph = decoder(3)
    costs = decoder_costs(graph)
    fresh, experienced = ExactSearch(SearchContext(graph, costs)), ExactSearch(SearchContext(graph, costs))
    for percent in (80, 50, 30):
        experienced.within(graph.resident_bytes + fresh.context.plain.peak_bytes * percent // 100)

    least = fresh.min_peak
    least_peak._least.clear()

    assert experienced.min_peak.peak_bytes == least.peak_bytes
    assert experienced.min_peak.actions == least.actions
