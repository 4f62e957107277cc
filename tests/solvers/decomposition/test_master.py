"""Column generation: a subgraph peaks where the step does, columns add up, and the result agrees with one model."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.case_graphs import load_case
from support.quick import examples, thorough_but
from support.strategies import small_graphs
from support.toy_graphs import decoder, decoder_costs, linear_tanh, unit_costs

from lowtide.graph.facts import step_facts
from lowtide.graph.step_graph import UNPACK
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.simulation.simulator import simulate_actions
from lowtide.solvers import tuning
from lowtide.solvers.decomposition.master import ColumnGeneration
from lowtide.solvers.decomposition.multi_segment import MultiSegmentColumns
from lowtide.solvers.decomposition.segments import segments, windows
from lowtide.solvers.decomposition.subgraph import SubgraphSource
from lowtide.solvers.decomposition.subgraph_builder import build_subgraph
from lowtide.solvers.dispatch import solve
from lowtide.solvers.exact import ExactSearch
from lowtide.solvers.graph_queries import complete_actions, layers
from lowtide.solvers.lower_bound.bound import bound_time
from lowtide.solvers.published.full import full
from lowtide.solvers.search_context import SearchContext


def cut_up(graph, costs, segment_of=None):
    """The decomposition of a step, by layers or as told."""
    segment_of = segment_of or segments(graph)
    found = windows(graph, segment_of)
    return segment_of, found, SubgraphSource(SearchContext(graph, costs), segment_of, found)


def decoder_pool(layers):
    """A decoder, its costs, its pool and its plain peak."""
    graph = decoder(layers)
    costs = decoder_costs(graph)
    *_, source = cut_up(graph, costs)
    return (
        graph,
        costs,
        ColumnGeneration(source),
        simulate_actions(graph, costs, {}).peak_bytes,
    )


def assert_windows_agree(graph, costs, found, source):
    whole = simulate_actions(graph, costs, {}).event_peak_bytes
    for segment, window in enumerate(found):
        subgraph = build_subgraph(source, range(segment, segment + 1))
        peaks = subgraph.context.plain.timeline.event_peak_bytes
        ours = max(peaks[: subgraph.backward_start], default=0), max(peaks[subgraph.content.backward :], default=0)
        # An empty window holds what lived when it began.
        for mine, (begin, end) in zip(ours, (window.forward, window.backward), strict=True):
            if begin < end:
                assert mine == max(whole[begin:end])


@pytest.mark.parametrize("graph", [decoder(6), decoder(3, hidden=32), linear_tanh(20)], ids=["decoder", "thin", "tanh"])
def test_a_subgraph_peaks_where_the_step_does(graph):
    costs = unit_costs(graph)
    _, found, source = cut_up(graph, costs)
    assert len(found) >= 3
    assert_windows_agree(graph, costs, found, source)


@settings(max_examples=examples(200), deadline=None)
@given(graph=small_graphs(most_ops=6), data=st.data())
def test_a_subgraph_of_any_segments_peaks_where_the_step_does(graph, data):
    ops = [op.id for op in graph.forward_ops]
    cut = data.draw(st.integers(1, len(ops)))
    segment_of = {op: int(place >= cut) for place, op in enumerate(ops)}
    segment_of = {op: min(s, max(segment_of.values())) for op, s in segment_of.items()}
    _, found, source = cut_up(graph, unit_costs(graph), segment_of)
    assert_windows_agree(graph, unit_costs(graph), found, source)


def test_columns_add_up():
    """A plan's peak over the whole step is what its columns say, whichever segments it touches."""
    graph, costs, pool, plain = decoder_pool(6)
    pool.solve(plain // 2, 0.0, math.inf)
    seen = 0
    for pick in range(max(len(k.columns) for k in pool.distinct_pools)):
        columns = [k.columns[(pick + i) % len(k.columns)] for i, k in enumerate(pool.pools)]
        chosen = list(zip(pool.runs, columns, strict=True))
        saved, claimed = 0, 0
        for run, column in chosen:
            claimed = max(claimed, max(run.peaks(column)) - saved)
            saved += run.pool.plain.kept_bytes - column.kept_bytes
        actions = pool.combine(chosen, 0.0).actions
        seen += any(a == RECOMPUTE for a in actions.values())
        line = simulate_actions(graph, costs, actions)
        assert line.peak_bytes == claimed
        assert line.recompute_ms - costs.dispatch_us / 1e3 * len(graph.forward_ops) == pytest.approx(
            sum(c.ms for c in columns)
        )
    assert seen > 3


def test_equal_layers_are_planned_once():
    """Twice the layers ask for hardly more pricing: time grows with the number of different ones."""
    priced = []
    for depth in (8, 24):
        _, _, pool, plain = decoder_pool(depth)
        assert len(pool.pools) >= depth and len(pool.distinct_pools) <= 4
        assert pool.solve(int(0.4 * plain), 0.0, math.inf) is not None
        priced.append(sum(len(k._priced) for k in pool.distinct_pools))
    assert priced[1] <= 1.5 * priced[0]


@pytest.mark.parametrize("fraction", thorough_but((0.6,), (0.6, 0.35)))
def test_decomposed_segments_are_as_good_as_one_model(fraction, monkeypatch):
    graph = decoder(5)
    costs = decoder_costs(graph)
    together = solve(graph, costs, f"{100 * fraction}%")
    monkeypatch.setattr(tuning, "MONOLITHIC_SIZE", 0)
    decomposed = solve(graph, costs, f"{100 * fraction}%")
    assert decomposed.predicted_peak_bytes <= decomposed.budget_bytes
    assert decomposed.predicted_step_ms <= together.predicted_step_ms * 1.005
    assert decomposed.bound_ms <= together.predicted_step_ms * 1.005


def test_the_bound_of_decomposed_segments_is_one():
    """No choice of columns that fits is faster than the bound; here all choices of a pool are tried."""
    graph, costs, pool, plain = decoder_pool(3)
    budget = int(0.45 * plain)
    choice = pool.solve(budget, 0.0, math.inf)
    fastest = float("inf")
    by_kept = [sorted(k.columns, key=lambda c: c.kept_bytes) for k in pool.pools]
    for columns in itertools.product(*(some[:: max(len(some) // 4, 1)] for some in by_kept)):
        ms, chosen = sum(c.ms for c in columns), list(zip(pool.runs, columns, strict=True))
        whole = pool.combine(chosen, 0.0)
        line = ms < fastest and simulate_actions(graph, costs, whole.actions, whole.replays)
        if line and line.peak_bytes <= budget:
            fastest = ms
    chosen = simulate_actions(graph, costs, choice.actions, choice.replays)
    chosen_ms = chosen.recompute_ms - costs.dispatch_us / 1e3 * len(graph.forward_ops)
    assert chosen.peak_bytes <= budget
    assert choice.bound_ms <= chosen_ms + 1e-9 <= fastest * 1.01 + 1e-9 < float("inf")


def test_windows_need_forward_before_backward():
    graph = decoder(3)
    events = list(graph.events)
    first = next(at for at, (kind, _) in enumerate(events) if kind == UNPACK)
    twisted = type(graph)(**{**vars_of(graph), "events": (events[first], *events[:first], *events[first + 1 :])})
    segment_of = {op.id: 0 for op in graph.forward_ops}
    assert windows(graph, segment_of) is not None
    assert windows(twisted, segment_of) is None


def vars_of(graph):
    return {name: getattr(graph, name) for name in type(graph).__dataclass_fields__}


def test_actions_of_a_pool_are_closed():
    graph, _, pool, plain = decoder_pool(6)
    choice = pool.solve(int(0.4 * plain), 0.0, math.inf)
    again = complete_actions(graph, [s for s, a in choice.actions.items() if a == RECOMPUTE and s in graph.stored],
                  [s for s, a in choice.actions.items() if a != RECOMPUTE and s not in graph.stored])  # fmt: skip
    assert again == choice.actions


def autocast_search(fraction):
    graph, costs = load_case("autocast")
    search = ExactSearch(SearchContext(graph, costs))
    return search, graph.resident_bytes + int(fraction * (search.context.plain.peak_bytes - graph.resident_bytes))


def test_columns_count_what_python_holds_until_forward_ends():
    """Autocast's copies of weights: dropped ones still live in forward, and when backward starts they do not."""
    search, budget = autocast_search(0.5)

    choice = search.decomposed.columns.solve(budget, 0.0, math.inf)

    assert search.decomposed.columns.separate_forward
    assert search.context.evaluate(choice.actions, choice.replays).peak_bytes <= budget


def test_two_layers_a_segment_find_what_one_cannot():
    """A layer's input made again out of what the layer before it keeps."""
    search, budget = autocast_search(0.5)

    one, both = search.decomposed.by_single_segments(budget), search.fastest(budget)

    saved_ms = one.best_ms - both.best_ms
    assert saved_ms > 0.005 * search.context.costs.plain_step_ms
    bound_ms = bound_time(search.context, budget).step_ms
    assert both.best_ms <= 1.005 * bound_ms


@pytest.mark.thorough
def test_runs_are_longer_where_backward_has_released_more():
    """At full checkpointing's peak 126 layers keep few of their inputs, and the fewer the lower they lie."""
    graph, costs = load_case("decoder126")
    search = ExactSearch(SearchContext(graph, costs))
    budget = search.context.evaluate(full(graph)).peak_bytes
    one = search.decomposed.by_single_segments(budget)
    bound = bound_time(SearchContext(graph, costs), budget)

    choice = search.decomposed.choose_runs(budget, bound.ms_per_byte, math.inf)

    evaluated = search.context.evaluate(choice.actions, choice.replays)
    assert evaluated.peak_bytes <= budget
    assert evaluated.timeline.step_ms < one.best_ms - 0.025 * costs.plain_step_ms
    layer_of, ends = layers(graph), {}
    for storage, action in choice.actions.items():
        op = graph.storages[storage].op
        if action == SAVE and layer_of.get(op) is not None and crosses(graph, storage, layer_of):
            ends[layer_of[op]] = storage
    gaps = [b - a for a, b in itertools.pairwise(sorted(ends))]
    assert len(ends) < 60
    assert sum(gaps[:5]) > 2 * sum(gaps[-5:])


def crosses(graph, storage, layer_of):
    """Whether the next layer reads what this one makes."""
    mine = layer_of[graph.storages[storage].op]
    return any(layer_of.get(op) == mine + 1 for op in step_facts(graph).readers.get(storage, ()))


def test_runs_add_up():
    """A run of segments peaks where the step does, wherever it lies, and takes what its column says."""
    graph, costs, pool, plain = decoder_pool(9)
    pool.solve(plain // 2, 0.0, math.inf)
    multi_segment = MultiSegmentColumns(pool.source, pool.runs)
    multi_segment.price_pairs(0.01, pool.dual_prices, math.inf)
    runs = multi_segment.up_to(multi_segment.longest)
    assert pool.choose(plain // 2, [*pool.runs, *runs], 0.0) is not None
    tried = 0
    for run in multi_segment.up_to(4):
        for column in run.pool.columns[::3]:
            whole = pool.combine([(run, column)], 0.0)
            line = simulate_actions(graph, costs, whole.actions, whole.replays)
            assert max(run.peaks(column)) <= line.peak_bytes
            if max(run.peaks(column)) > plain:
                assert max(run.peaks(column)) == line.peak_bytes
            mode_ms = costs.dispatch_us / 1e3 * len(graph.forward_ops) * bool(column.ms)
            assert line.recompute_ms - mode_ms == pytest.approx(column.ms)
            tried += 1
    assert tried > 30


def test_the_least_peak_prices_no_columns_once_it_has_taken_too_many_pivots(monkeypatch):
    graph = decoder(6)

    def columns_after_least_peak():
        columns = ColumnGeneration.of(SearchContext(graph, decoder_costs(graph)))
        columns.min_peak_choice()
        return columns

    free = columns_after_least_peak()
    assert sum(pool.pivots for pool in free.distinct_pools) > 0
    monkeypatch.setattr(tuning, "MIN_PEAK_PIVOTS", 0)
    assert sum(pool.pivots for pool in columns_after_least_peak().distinct_pools) == 0
