"""The simulator against timelines computed by hand."""

import dataclasses

import pytest
from support.toy_graphs import Step, chain, decoder, decoder_costs, unit_costs

from lowtide.errors import PlanMismatchError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import RELEASE, UNPACK
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.simulation.simulator import simulate
from lowtide.solvers.dispatch import solve


def replayed(line):
    return [r.op for r in line.replays]


def live_after(graph, line, kind, storage):
    """Live bytes after the first event of ``kind`` on a handle of ``storage``."""
    return next(
        line.live_bytes[at]
        for at, (k, number) in enumerate(graph.events)
        if k == kind and graph.saved[number] == storage
    )


def test_a_chain_that_keeps_everything_holds_each_input_until_its_backward_is_done():
    # x1 = f(w), x2 = f(x1), x3 = f(x2), 8 bytes each; backward makes the gradients of x2 and of x1.
    graph = chain(3, size=8)

    line = simulate(graph, unit_costs(graph), {})

    forward = (8, 8, 16, 16, 16, 24, 24, 24, 16)  # run pack | run pack free(x1) | run pack free(x2) free(x3)
    last = (16, 24, 24, 16)  # unpack run drop release
    middle = (16, 24, 24, 16, 8)  # ... and the gradient of x2 goes
    first = (8, 8, 8, 8, 0)
    assert line.live_bytes == forward + last + middle + first
    assert (line.peak_bytes, line.peak_event, line.step_ms) == (24, 5, 6.0)
    assert line.recompute_ms == 0 and line.replays == ()


def test_a_recomputed_chain_is_empty_between_forward_and_backward():
    graph = chain(3, size=8)

    line = simulate(graph, unit_costs(graph), {1: RECOMPUTE, 2: RECOMPUTE})

    forward = (8, 8, 16, 16, 8, 16, 16, 8, 0)
    last = (16, 24, 24, 16)  # the first unpack brings x1 and x2 back
    assert line.live_bytes[:13] == forward + last
    assert replayed(line) == [0, 1]
    assert [r.peak_bytes for r in line.replays] == [8, 16]
    assert line.step_ms == 6.0 + 2.0


def test_what_is_resident_is_part_of_the_peak():
    step = Step(resident=100)
    step.op(step.parameter(), makes=(8,), saves="nothing")
    graph = step.graph()

    line = simulate(graph, unit_costs(graph), {})

    assert line.peak_bytes == 108 and line.live_bytes[-1] == 100


def two_readers_of_one_intermediate():
    step = Step()
    a = step.op(step.parameter(), makes=(4,), saves="nothing")
    b = step.op(a, makes=(8,), saves="nothing")
    c = step.op(a, makes=(16,), saves="nothing")
    step.op(b, makes=(1,))
    step.op(c, makes=(1,))
    return step.graph(), a, b, c


def test_a_shared_intermediate_is_replayed_once_and_stays_for_its_second_reader():
    graph, a, b, c = two_readers_of_one_intermediate()

    line = simulate(graph, unit_costs(graph), {a: RECOMPUTE, b: RECOMPUTE, c: RECOMPUTE})

    assert replayed(line) == [0, 2, 1]  # backward asks for c first
    assert live_after(graph, line, UNPACK, c) == 4 + 16  # a waits for b
    assert live_after(graph, line, RELEASE, c) == 4 + 16  # a, and the gradient of c
    assert live_after(graph, line, UNPACK, b) == 16 + 8  # a is gone, the gradient of c is there


def test_an_intermediate_that_is_kept_for_replays_is_pinned_until_the_last_of_them():
    graph, a, b, c = two_readers_of_one_intermediate()

    line = simulate(graph, unit_costs(graph), {a: SAVE, b: RECOMPUTE, c: RECOMPUTE})

    assert replayed(line) == [2, 1]
    between = [at for at, (kind, _) in enumerate(graph.events) if kind == UNPACK][1] - 1
    assert line.live_bytes[between - 4] == 4  # all of forward is over: only a
    assert live_after(graph, line, UNPACK, b) == 16 + 8


def test_a_recipe_pins_what_it_reads_beyond_its_release():
    step = Step()
    x = step.op(step.parameter(), makes=(8,), saves="nothing")
    y = step.op(x, makes=(2,), saves="nothing")
    step.op(y, makes=(1,))
    step.op(x, makes=(1,))  # backward releases x here, before anything asks for y
    graph = step.graph()

    saved = simulate(graph, unit_costs(graph), {})
    dropped = simulate(graph, unit_costs(graph), {y: RECOMPUTE})

    assert live_after(graph, saved, RELEASE, x) == 2 + 8  # y, and the gradient of x
    assert live_after(graph, dropped, RELEASE, x) == 8 + 8  # x itself, and its gradient
    assert live_after(graph, dropped, UNPACK, y) == 2 + 8


def test_a_materialised_value_stays_for_its_second_consumer():
    step = Step()
    y = step.op(step.parameter(), makes=(8,), saves="nothing")
    step.op(y, makes=(1,))
    step.op(y, makes=(1,))
    graph = step.graph()

    line = simulate(graph, unit_costs(graph), {y: RECOMPUTE})

    assert replayed(line) == [0]
    assert live_after(graph, line, RELEASE, y) == 8 + 8  # y for the first op, and its gradient
    assert line.live_bytes[-1] == 0


def test_an_output_nobody_waits_for_is_freed_as_soon_as_its_sibling_is_back():
    step = Step()
    out, mask = step.op(step.parameter(), makes=(8, 2), saves=lambda outputs: outputs[1:], workspace=5)
    step.op(out, makes=(1,), saves="nothing")
    graph = step.graph()

    line = simulate(graph, unit_costs(graph), {mask: RECOMPUTE})

    assert [r.peak_bytes for r in line.replays] == [8 + 8 + 2 + 5]  # the gradient of out, both outputs, workspace
    assert live_after(graph, line, UNPACK, mask) == 8 + 2


def test_a_random_recipe_holds_generator_state_until_it_is_replayed():
    step = Step()
    y = step.op(step.parameter(), makes=(8,), saves="nothing", rng=3)
    step.op(y, makes=(1,))
    graph = step.graph()

    line = simulate(graph, unit_costs(graph), {y: RECOMPUTE})

    assert line.live_bytes[0] == 8 + 3
    assert min(line.live_bytes[:-4]) == 3
    assert live_after(graph, line, UNPACK, y) == 8


def test_a_recipe_that_nothing_waits_for_dies_and_lets_go_of_what_it_reads():
    graph, a, b, c = two_readers_of_one_intermediate()

    # Nothing stores b any more, so its recipe must not hold a.
    graph = dataclasses.replace(
        graph,
        saved=(*graph.saved[:1], c, c),
        events=tuple(e for e in graph.events if e[0] == 0 or e[0] == 1 or graph.saved[e[1]] != b),
    )
    line = simulate(graph, unit_costs(graph), {a: SAVE, b: RECOMPUTE})

    assert replayed(line) == []
    assert live_after(graph, line, UNPACK, c) == 16


def test_time_counts_replays_recipes_and_the_watched_forward():
    graph = chain(3)
    costs = Costs(op_ms=(1.0,) * 6, dispatch_us=100, record_us=10, replay_us=1)

    line = simulate(graph, costs, {1: RECOMPUTE, 2: RECOMPUTE})

    assert line.recompute_ms == pytest.approx(2 * 1.0 + 2 * 0.001 + 2 * 0.01 + 3 * 0.1)
    assert line.step_ms == pytest.approx(6 + line.recompute_ms)
    assert simulate(graph, costs, {1: SAVE}).step_ms == 6


def test_a_plan_for_another_graph_is_refused():
    plan = solve(chain(3), unit_costs(chain(3)), method="none")
    other = chain(4)

    with pytest.raises(PlanMismatchError) as caught:
        simulate(other, unit_costs(other), plan)

    assert str(caught.value) == (
        f"the plan was made for graph {chain(3).fingerprint}, this graph is {other.fingerprint}. "
        "Solve again for this graph, or load the graph that the plan was made for."
    )


def written_in_place():
    step = Step()
    y = step.op(step.parameter(), makes=(8,), fixed="written in place")
    step.op(y)
    return step.graph(), {y: RECOMPUTE}


def reads_a_written_buffer():
    step = Step()
    y = step.op(step.parameter(fixed="written by op 1"), makes=(8,))
    step.op(y)
    return step.graph(), {y: RECOMPUTE}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (written_in_place, "storage 1 cannot be recomputed: written in place. Save it."),
        (
            reads_a_written_buffer,
            "storage 1 cannot be recomputed: its op reads storage 0, which written by op 1. Save it.",
        ),
        (lambda: (chain(2), {0: RECOMPUTE}), "storage 0 cannot be recomputed: it was there before the step. Save it."),
        (lambda: (chain(2), {3: RECOMPUTE}), "storage 3 cannot be recomputed: it is made in backward. Save it."),
        (lambda: (chain(2), {9: SAVE}), "the plan decides on storage 9, the graph has 4. Solve again for it."),
        (
            lambda: (chain(2), {1: "cpu_offload"}),
            "storage 1: action 'cpu_offload' needs the link to the host tier, and costs knows none.\n"
            "Measure it: lowtide.measure(graph, tiers=('host',)).",
        ),
    ],
)
def test_actions_that_the_graph_does_not_allow_are_refused(case, message):
    graph, actions = case()

    with pytest.raises(PlanMismatchError) as caught:
        simulate(graph, unit_costs(graph), actions)

    assert str(caught.value) == message


def test_nothing_is_left_when_the_step_is_over():
    graph = decoder(layers=3)
    costs = decoder_costs(graph)
    output = next(s for s in reversed(graph.storages) if s.kind == "activation")

    for method in ("none", "full", "sqrt_n", "selective"):
        line = simulate(graph, costs, solve(graph, costs, method=method))
        assert line.live_bytes[-1] == graph.resident_bytes + output.bytes  # the loss, which the caller holds
