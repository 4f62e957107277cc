"""A plan for a larger shape keeps its budget on every smaller one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plan_transfer import plan_for
from support.quick import examples
from support.strategies import small_cases
from support.toy_graphs import chain, decoder_costs, unit_costs
from support.watched_shapes import TOKENS, decoder_family, decoder_of, model_of, watched

import lowtide
from lowtide.errors import BudgetInfeasibleError, PlanMismatchError
from lowtide.plan import RECOMPUTE
from lowtide.shapes.shape_family import ShapeFamily
from lowtide.simulation.simulator import simulate


def planned(length, budget="40%", **options):
    graph = decoder_of(1, length)
    return lowtide.solve(graph, decoder_costs(graph), budget, **options)


def test_the_decisions_stay_and_the_predictions_are_of_the_other_graph():
    plan = planned(32)
    graph = decoder_of(1, 24)
    costs = decoder_costs(graph)

    found = plan_for(graph, costs, plan)

    assert found.action_of() == plan.action_of() and found.replays_of() == plan.replays_of()
    assert found.graph_fingerprint == graph.fingerprint
    assert found.budget_bytes == plan.budget_bytes and found.bound_ms is None
    assert found.predicted_peak_bytes == simulate(graph, costs, found).peak_bytes <= plan.budget_bytes
    assert 0 < found.predicted_step_ms < plan.predicted_step_ms
    assert all(d.bytes == graph.storages[d.storage].bytes for d in found.decisions)
    assert found.provenance["transferred"] == f"from graph {plan.graph_fingerprint}"


def test_a_larger_shape_that_breaks_the_budget_is_refused():
    graph = decoder_of(1, 48)

    with pytest.raises(PlanMismatchError, match=r"would need .* Plan for this shape, or for one that covers it\."):
        plan_for(graph, decoder_costs(graph), planned(32))


def test_other_ops_are_refused():
    graph = decoder_of(1, 32)
    plan = planned(32)
    other = replace(graph.ops[0], name="aten.other.default")
    renamed = replace(graph, ops=(other, *graph.ops[1:]))
    moved = replace(plan, decisions=(replace(plan.decisions[0], op=plan.decisions[0].op + 1), *plan.decisions[1:]))
    absent = replace(plan, decisions=(replace(plan.decisions[0], storage=len(graph.storages)),))

    for asked, given_plan, reason in (
        (chain(), plan, "module calls are not the graph's 1"),
        (renamed, plan, "forward op 0 is aten.embedding.default in the plan and aten.other.default in the graph"),
        (replace(graph, ops=graph.ops[:-80]), plan, "forward ops, the graph"),
        (graph, moved, "is made elsewhere"),
        (graph, absent, "it decides on storage"),
    ):
        with pytest.raises(PlanMismatchError, match=reason):
            plan_for(asked, unit_costs(asked), given_plan)


@settings(max_examples=examples(40), deadline=None)
@given(small_cases(), st.floats(0.2, 1.0), st.data())
def test_where_nothing_is_larger_the_peak_is_no_higher(case, share, data):
    graph, costs = case
    try:
        plan = lowtide.solve(graph, costs, f"{100 * share:.0f}%")
    except BudgetInfeasibleError as error:
        plan = lowtide.solve(graph, costs, max(error.least_bytes, 1))
    sizes = [data.draw(st.integers(0, s.bytes)) for s in graph.storages]
    smaller = replace(
        graph,
        storages=tuple(replace(s, bytes=size) for s, size in zip(graph.storages, sizes)),
        ops=tuple(replace(op, workspace_bytes=op.workspace_bytes // 2) for op in graph.ops),
    )

    assert plan_for(smaller, costs, plan).predicted_peak_bytes <= plan.predicted_peak_bytes


@pytest.mark.parametrize(("kind", "budget", "method"), [("llama", "40%", "exact"), ("bert", "60%", "full")])
def test_a_plan_for_the_longest_batch_keeps_its_budget_on_all_shorter_ones(kind, budget, method):
    family = ShapeFamily()
    for length in (48, 96, 128, 160):
        graph = watched(kind, 2, length, padded=True)
        family.add((2, length), graph, unit_costs(graph))
    longest = family.derive((2, 160))
    plan = lowtide.solve(longest.graph, longest.costs, budget, method=method)
    assert plan.counts[RECOMPUTE]

    for length in range(48, 160, 9):
        derived = family.derive((2, length))
        assert plan_for(derived.graph, derived.costs, plan).predicted_peak_bytes < plan.budget_bytes


def test_a_transferred_plan_runs_the_real_model_bitwise():
    import torch
    from support.training_steps import differing, plain
    from support.training_steps import planned as step_under

    family = ShapeFamily()
    for length in (48, 64, 96):
        graph = watched("llama", 2, length, padded=False)
        family.add((2, length), graph, unit_costs(graph))
    longest = family.examples[-1]
    plan = lowtide.solve(longest.graph, longest.costs, method="full")
    derived = family.derive((2, 80))
    ids = torch.randint(3, 64, (2, 80 * TOKENS))
    batch = {"input_ids": ids, "labels": ids}

    model = model_of("llama")
    found = step_under(model, batch, plan_for(derived.graph, derived.costs, plan))

    assert differing(plain(model, batch), found) == []


def test_a_family_of_handmade_decoders_serves_every_shorter_length():
    family = decoder_family((1, 8), (1, 16), (1, 24), (1, 32))
    plan = planned(32)

    for length in range(1, 33):
        derived = family.derive((1, length))
        assert plan_for(derived.graph, derived.costs, plan).predicted_peak_bytes <= plan.budget_bytes
