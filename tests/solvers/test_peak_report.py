"""What a plan says of itself: what binds its peak, what memory is worth, which decisions weigh most."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples
from support.strategies import small_graphs
from support.toy_graphs import Step, chain, decoder, decoder_costs, unit_costs

from lowtide.errors import GraphFormatError
from lowtide.explanation import DecisionGroup, Evidence, PeakGroup
from lowtide.graph.costs import Costs
from lowtide.plan import RECOMPUTE, Plan
from lowtide.reports.html import html_report
from lowtide.reports.summary import summary
from lowtide.reports.terminal import fit_report
from lowtide.simulation.peak_contents import contents_at_peak
from lowtide.simulation.simulator import simulate_actions
from lowtide.solvers.dispatch import solve
from lowtide.solvers.graph_queries import complete_actions, recomputable
from lowtide.solvers.lower_bound.bound import bound_time
from lowtide.solvers.search_context import SearchContext


def two_blocks():
    """Two blocks of (linear, act); the second act's backward meets what all of them saved."""
    step = Step(resident=100)
    x = step.parameter()
    for block in range(2):
        h = step.op(x, makes=(40,), path=f"net.{block}.linear", name="mm")
        x = step.op(h, makes=(60,), path=f"net.{block}.act", name="gelu")
    step.op(x, makes=(1,), path="head", name="mean")
    return step.graph()


def test_the_moment_and_the_tensors_that_bind_are_named():
    graph = two_blocks()

    told = solve(graph, unit_costs(graph), method="none").explain()

    # In backward of block 1's act: both blocks' 40 and 60, and the gradients of its input (40) and output (60).
    assert (told.peak_bytes, told.resident_bytes) == (100 + 200 + 60, 100)
    assert (told.when, told.module, told.op) == ("backward", "head", "mean_backward")
    assert told.holders == (
        PeakGroup("saved", "net.*.act", "gelu", 2, 120),
        PeakGroup("saved", "net.*.linear", "mm", 2, 80),
        PeakGroup("backward", "head", "mean_backward", 1, 60),
    )
    assert told.other_bytes == 0


def test_what_a_replay_brings_back_is_told_from_what_was_saved():
    step = Step()
    a = step.op(step.parameter(), makes=(8,), path="a", name="mm")
    b = step.op(a, makes=(80,), path="b", name="mm")
    c = step.op(b, makes=(4,), path="c", name="mm")
    step.op(c, makes=(2,), path="d", name="mm")
    graph = step.graph()

    actions = complete_actions(graph, [b])
    held = contents_at_peak(graph, actions, {}, simulate_actions(graph, unit_costs(graph), actions))

    # c's backward: b is back, beside the gradients of c and of b.
    assert (held.peak_bytes, held.replayed) == (8 + 80 + 4 + 80, {b: 80})
    assert sorted(held.originals.values()) == [4, 8, 80] and held.originals[a] == 8
    assert graph.ops[held.op].backward and not held.replay


@settings(max_examples=examples(150), deadline=None)
@given(graph=small_graphs(most_ops=8), data=st.data())
def test_what_lives_at_the_peak_adds_up_to_the_peak(graph, data):
    free = sorted(recomputable(graph))
    picked = {s for s in free if data.draw(st.booleans())}
    actions = complete_actions(graph, picked & graph.stored, picked - graph.stored)
    replays = {s: data.draw(st.integers(1, 3)) for s, action in actions.items() if action == RECOMPUTE}
    line = simulate_actions(graph, unit_costs(graph), actions, replays)

    held = contents_at_peak(graph, actions, replays, line)

    assert held.peak_bytes == line.peak_bytes and held.event == line.peak_event
    op = None if held.op is None else graph.ops[held.op]
    recipes = {graph.storages[s].op for s, action in actions.items() if action == RECOMPUTE}
    most_rng = sum(graph.ops[o].rng_bytes for o in recipes) + (op.rng_bytes if op else 0)
    least = held.peak_bytes - graph.resident_bytes - (op.workspace_bytes if op else 0) - most_rng
    told = sum(held.originals.values()) + sum(held.replayed.values())
    assert least <= told <= held.peak_bytes - graph.resident_bytes
    assert set(held.replayed) <= recomputable(graph) | {s for o in recipes for s in graph.ops[o].makes}


def test_the_price_is_the_bounds_and_a_gib_takes_off_no_more_than_there_is():
    graph = decoder(layers=2)
    costs = decoder_costs(graph)
    plan = solve(graph, costs, "50%")

    told = plan.explain()

    assert told.ms_per_byte == bound_time(SearchContext(graph, costs), plan.budget_bytes).ms_per_byte > 0
    assert told.ms_per_gib == pytest.approx(plan.predicted_step_ms - plan.plain_step_ms)
    assert solve(graph, costs, method="full").explain().ms_per_byte is None


def test_the_decisions_that_weigh_most_come_first_and_like_ones_together():
    graph = chain(6, size=8)
    costs = Costs((5.0, 1.0, 1.0, 1.0, 1.0, 1.0, *(1.0,) * 6))
    plan = solve(graph, costs, simulate_actions(graph, costs, {}).peak_bytes - 8)

    told = plan.explain()

    assert told.ms_per_byte == pytest.approx(1 / 8)
    (saved,) = [d for d in told.decisions if d.action == "save"]
    (again,) = [d for d in told.decisions if d.action == RECOMPUTE]
    assert saved == DecisionGroup("save", "(outside modules)", "op", 4, 32, 0.0, pytest.approx(4.0))
    assert again == DecisionGroup(RECOMPUTE, "(outside modules)", "op", 1, 8, 1.0, 0.0)
    assert told.decisions == (saved, again)


def test_outputs_of_one_op_are_replayed_by_one_run():
    step = Step()
    x = step.op(step.parameter(), makes=(8,), path="a", name="mm")
    y, z = step.op(x, makes=(8, 8), saves="makes", path="b", name="norm")
    step.op(y, z, makes=(1,), saves="nothing", path="c", name="sum")
    graph = step.graph()
    plan = solve(graph, unit_costs(graph), method="none")
    decisions = tuple(
        dataclasses.replace(d, action=RECOMPUTE, recompute_ms=2.0) for d in plan.decisions if plan.scope(d) == "b"
    )

    (weight,) = dataclasses.replace(plan, decisions=decisions).explain().decisions

    assert (weight.count, weight.bytes, weight.recompute_ms) == (2, 16, 2.0)


def test_it_reads_back_and_an_older_plan_says_what_it_does_not_know():
    graph = two_blocks()
    plan = solve(graph, unit_costs(graph), method="none")
    body = json.loads(plan.to_json())
    older = {k: v for k, v in body.items() if k not in ("evidence", "bound_model")}

    again, old = Plan.from_json(plan.to_json()), Plan.from_json(json.dumps(older))

    assert again == plan and again.explain() == plan.explain()
    assert str(old.explain()).startswith("peak 360 B; what binds it was not written down: plan again")
    assert old.explain().holders == () and old.explain().decisions == plan.explain().decisions


@pytest.mark.parametrize("evidence", [[], {"holders": [[1]]}, {"peak": "now"}])
def test_evidence_that_is_none_is_refused(evidence):
    graph = two_blocks()
    body = json.loads(solve(graph, unit_costs(graph), method="none").to_json())
    body["evidence"] = evidence

    with pytest.raises(GraphFormatError, match="not a plan: "):
        Plan.from_json(json.dumps(body))


def test_it_prints_like_this():
    graph = two_blocks()

    told = str(solve(graph, unit_costs(graph), 340).explain())

    assert (
        told
        == """\
peak 300 B, in backward, while mean_backward of head runs
        100 B  before the step
         80 B  saved      2 x mm, net.*.linear
         60 B  backward   mean_backward, head
         60 B  saved      gelu, net.*.act
one more byte takes at most 0.0167 ms off the step
largest decisions (saved: the time that their memory would save elsewhere)
         80 B  save              1.3 ms  2 x mm, net.*.linear
         60 B  recompute         1.0 ms  gelu, net.*.act
         60 B  save              1.0 ms  gelu, net.*.act"""
    )


def test_names_however_long_fit_the_page():
    plan = solve(two_blocks(), unit_costs(two_blocks()), 340)
    frames = tuple(dataclasses.replace(f, path="encoder_of_something." * 20) for f in plan.frames)
    ops = tuple(dataclasses.replace(o, name=f"custom.{'operator_' * 20}.default") for o in plan.ops)
    told = json.dumps(dataclasses.asdict(plan.evidence)).replace("gelu", "gelu" * 40).replace("net.", "net." * 40)
    evidence = Evidence.from_dict(json.loads(told))

    told = str(dataclasses.replace(plan, frames=frames, ops=ops, evidence=evidence).explain())

    assert max(map(len, told.splitlines())) <= 100


def test_every_report_shows_it():
    graph = two_blocks()
    plan = solve(graph, unit_costs(graph), 340)

    assert str(plan.explain()) in fit_report(plan)
    assert ">What binds</h2>" in html_report(plan) and "replay" in html_report(plan)
    assert summary(plan)["explanation"]["holders"][0]["bytes"] == plan.explain().holders[0].bytes
    older = dataclasses.replace(plan, evidence=None)
    assert "What binds" not in html_report(older) and summary(older)["explanation"] is None
