"""How often an op is replayed: the count in a plan, its accounting, and the tape that keeps to it."""

from __future__ import annotations

import copy
import gc
import json
import random
from collections import Counter
from functools import cache
from math import comb
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import Net, differing, mlp, outcome, plain, planned, replays
from test_solvers import small_graphs
from torch import nn
from toys import Step, chain, unit_costs

import lowtide
from lowtide import ReplayError
from lowtide.errors import GraphFormatError, PlanMismatchError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import UNPACK, StepGraph
from lowtide.plan import RECOMPUTE, SAVE, Plan
from lowtide.simulator import Timeline, simulate, simulate_actions
from lowtide.solvers.draft import Draft, finish
from lowtide.solvers.structure import close, recomputable
from lowtide.tape import bursts, recipes, values


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


# -- the judge --------------------------------------------------------------------------------------------------------


def ran(line: Timeline) -> list[int]:
    return [r.op for r in line.replays]


def test_a_chain_replayed_anew_for_every_step_holds_one_value_between_bursts():
    graph = chain(4, size=8)  # x1 .. x3 are stored

    line = simulate_actions(graph, unit_costs(graph, replay_us=1), dict.fromkeys((1, 2, 3), RECOMPUTE), {1: 3, 2: 2})

    # backward asks for x3, x2, x1; the last run of each is the one it was asked by
    assert ran(line) == [0, 1, 2, 0, 1, 0]
    # (x1) (x1 x2) (x2 x3), then beside the gradient of x3 (x1) (x1 x2), then beside that of x2 (x1)
    assert [r.peak_bytes for r in line.replays] == [8, 16, 16, 16, 24, 16]
    assert line.step_ms == pytest.approx(8 + 6 * 1.001)
    assert line.live_bytes[-1] == 0


def test_the_last_replay_makes_a_value_for_good():
    graph = chain(4, size=8)

    first, second = (
        simulate_actions(graph, unit_costs(graph), dict.fromkeys((1, 2, 3), RECOMPUTE), {x: 2}) for x in (1, 2)
    )

    assert ran(first) == [0, 1, 2, 0]  # x2 is there when it is asked for, x1 is not
    assert ran(second) == [0, 1, 2, 1]  # x1 stays from the first burst on


def squared_and_mapped() -> tuple[StepGraph, int]:
    """y is stored twice by an op, then once by another, whose backward comes first."""
    step = Step()
    y = step.op(step.parameter(), makes=(8,), saves="nothing")
    step.op(y, makes=(1,), saves=(y, y))
    step.op(y, makes=(1,))
    return step.graph(), y


def test_a_value_that_backward_still_has_is_not_made_again():
    graph, y = squared_and_mapped()

    line = simulate_actions(graph, unit_costs(graph), {y: RECOMPUTE}, {y: 5})

    assert ran(line) == [0, 0]  # once for each of the two backward ops
    unpacks = [at for at, (kind, _) in enumerate(graph.events) if kind == UNPACK]
    assert [line.live_bytes[at] for at in unpacks] == [8, 8 + 8, 8 + 8]  # y, beside its gradient from the second on
    assert line.live_bytes[unpacks[1] - 1] == 8  # in between only the gradient


def test_the_count_is_the_ops_and_the_largest_of_its_outputs():
    step = Step()
    a, b = step.op(step.parameter(), makes=(8, 2), saves="nothing")
    step.op(a, makes=(1,))
    step.op(b, makes=(1,))
    graph = step.graph()

    once, twice = (
        simulate_actions(graph, unit_costs(graph), {a: RECOMPUTE, b: RECOMPUTE}, {a: n, b: 1}) for n in (1, 2)
    )

    assert (ran(once), ran(twice)) == ([0], [0, 0])
    asked_for_b = next(at for at, (kind, _) in enumerate(graph.events) if kind == UNPACK)
    assert (once.live_bytes[asked_for_b], twice.live_bytes[asked_for_b]) == (8 + 2, 2)


def test_a_random_op_keeps_its_generator_state_until_its_last_replay():
    step = Step()
    y = step.op(step.parameter(), makes=(8,), saves="nothing", rng=3)
    step.op(y, makes=(1,))
    step.op(y, makes=(1,))
    graph = step.graph()

    line = simulate_actions(graph, unit_costs(graph), {y: RECOMPUTE}, {y: 2})

    first, second = (at for at, (kind, _) in enumerate(graph.events) if kind == UNPACK)
    assert (line.live_bytes[first], line.live_bytes[second]) == (8 + 3, 8 + 8)


def test_a_count_below_one_is_refused():
    graph = chain(3)

    with pytest.raises(PlanMismatchError) as caught:
        simulate_actions(graph, unit_costs(graph), {1: RECOMPUTE}, {1: 0})

    assert str(caught.value) == (
        "storage 1: replays=0. A recomputed storage is made again at least once; give 1 or more, or 'save' it."
    )


@settings(max_examples=150, deadline=None)
@given(graph=small_graphs(), data=st.data())
def test_no_op_runs_more_often_than_planned_and_nothing_is_left(graph, data):
    costs = unit_costs(graph)
    free = sorted(recomputable(graph))
    picked = [s for s in free if data.draw(st.booleans())]
    actions = close(graph, [s for s in picked if s in graph.stored], [s for s in picked if s not in graph.stored])
    dropped = [s for s, action in actions.items() if action == RECOMPUTE]
    counts = {s: data.draw(st.integers(1, 4)) for s in dropped}

    once = simulate_actions(graph, costs, actions)
    line = simulate_actions(graph, costs, actions, counts)

    most = {op: max(counts.get(s, 1) for s in graph.ops[op].makes) for op in ran(line)}
    assert all(n <= most[op] for op, n in Counter(ran(line)).items())
    assert set(ran(line)) == set(ran(once))
    assert line.live_bytes[-1] == once.live_bytes[-1]


# -- a schedule from a paper ------------------------------------------------------------------------------------------


def revolve_steps(length: int, snapshots: int) -> int:
    """Least forward steps to reverse ``length`` with ``snapshots``, the initial state's among them.

    Griewank and Walther 2000, "Algorithm 799: revolve", ACM TOMS 26(1), https://doi.org/10.1145/347837.347846
    """
    r = 0
    while comb(snapshots + r, snapshots) < length:
        r += 1
    return r * length - comb(snapshots + r, r - 1) if r else 0


@cache
def split(length: int, snapshots: int) -> tuple[int, int]:
    """(forward steps, where the next snapshot goes) for ``length`` steps from a state that is kept."""
    if length == 1 or snapshots == 1:
        return length * (length - 1) // 2, 0
    return min((m + split(length - m, snapshots - 1)[0] + split(m, snapshots)[0], m) for m in range(1, length))


def revolve(length: int, snapshots: int) -> tuple[dict[int, str], dict[int, int]]:
    """Actions and counts for ``chain(length)``, whose x1, x2, ... are storages 1, 2, ..."""
    runs: Counter[int] = Counter()
    saved = {length - 1}

    def advance(first: int, last: int, forward: bool) -> None:
        if not forward:
            runs.update(range(first + 1, last + 1))

    def reverse(first: int, end: int, snapshots: int, forward: bool) -> None:
        """Steps ``first`` to ``end`` - 1; ``forward``: the step's own forward pass comes by here."""
        if end - first == 1:
            return
        if snapshots == 1:
            for last in reversed(range(first + 1, end)):
                advance(first, last, forward and last == end - 1)
            return
        middle = first + split(end - first, snapshots)[1]
        advance(first, middle, forward)
        if forward:
            saved.add(middle)
        reverse(middle, end, snapshots - 1, forward)
        reverse(first, middle, snapshots, False)

    reverse(0, length, snapshots, True)
    actions = {x: SAVE if x in saved else RECOMPUTE for x in range(1, length)}
    return actions, {x: runs[x] for x in range(1, length) if x not in saved}


@pytest.mark.parametrize(("length", "snapshots"), [(5, 1), (10, 3), (21, 2), (56, 4)])
def test_counts_carry_out_revolve(length, snapshots):
    graph = chain(length, size=8)
    actions, counts = revolve(length, snapshots)

    line = simulate_actions(graph, unit_costs(graph), actions, counts)

    # The step's own forward pass are the first length - 1 of the paper's steps.
    assert len(line.replays) == revolve_steps(length, snapshots) - (length - 1)
    # One snapshot is the parameter; beside the others two values and a gradient, or a value and two gradients.
    assert line.peak_bytes == 8 * (snapshots - 1) + 24


# -- plans ------------------------------------------------------------------------------------------------------------


def counted(graph: StepGraph, actions: dict[int, str], counts: dict[int, int]) -> Plan:
    costs = Costs(op_ms=(1.0,) * len(graph.ops))
    return finish(graph, costs, Draft(actions, replays=counts), method="full", budget_bytes=None, start_s=0)


def drop_all(graph: StepGraph, count: int) -> Plan:
    actions = close(graph, sorted(graph.stored))
    return counted(graph, actions, {s: count for s, action in actions.items() if action == RECOMPUTE})


def test_counts_survive_the_file_and_a_plan_without_them_loads():
    plan = drop_all(chain(4), 3)
    body = json.loads(plan.to_json())

    assert Plan.from_json(plan.to_json()) == plan
    assert plan.replays_of() == {1: 3, 2: 3, 3: 3}
    body["decisions"] = [row[:7] for row in body["decisions"]]
    assert Plan.from_json(json.dumps(body)).replays_of() == {}
    assert plan.predicted_peak_bytes == simulate(chain(4), unit_costs(chain(4)), plan).peak_bytes == 24


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", None])
def test_a_plan_with_a_count_that_is_none_is_refused(count):
    body = json.loads(drop_all(chain(3), 2).to_json())
    body["decisions"][0][7] = count

    with pytest.raises(GraphFormatError, match=r"not a plan: field 'decisions\[0\]' is .* Make the plan again."):
        Plan.from_json(json.dumps(body))


# -- the tape ---------------------------------------------------------------------------------------------------------


def tanhs(depth: int = 8, width: int = 64) -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers), torch.randn(128, width)


def mixed() -> tuple[nn.Module, torch.Tensor]:
    """Several outputs an op, random ops, an in-place activation, and a value that one op stores twice."""

    def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = self.norm(layer(x))
            h = torch.dropout(h, 0.2, True)
            h = torch.relu_(layer(h * h.sin()))
            x = x + h * h
        return x

    model = Net(forward, layers=4, width=64)
    model.norm = nn.LayerNorm(64)
    return model, torch.randn(128, 64)


def llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1, pad_token_id=0,
    )  # fmt: skip
    ids = torch.randint(1, 64, (2, 48))
    return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def plans(graph: StepGraph) -> list[Plan]:
    """All dropped with every count 2 and 3, and some choices of what to drop and how often."""
    dice, free = random.Random(0), sorted(recomputable(graph))
    found = [drop_all(graph, 2), drop_all(graph, 3)]
    for share in (0.4, 0.7, 1.0):
        kept = [s for s in free if s not in graph.stored and dice.random() < 0.1]
        actions = close(graph, [s for s in free if s in graph.stored and dice.random() < share], kept)
        dropped = [s for s, action in actions.items() if action == RECOMPUTE]
        found.append(counted(graph, actions, {s: dice.choice((1, 2, 3, 6)) for s in dropped}))
    return found


@pytest.mark.parametrize("case", [tanhs, mixed, llama])
def test_the_tape_replays_what_the_simulator_says_in_its_bytes_and_bit_for_bit(case):
    model, batch = case()
    graph = lowtide.trace(model, batch)
    for plan in plans(graph):
        proof = lowtide.verify(model, batch, plan, rounds=0)
        line = simulate(graph, unit_costs(graph), plan)
        with replays() as seen:
            planned(model, batch, plan)

        assert proof.equal, proof.differing
        assert proof.mismatched_ops == 0
        assert max(Counter(ran(line)).values()) > 1, "nothing is replayed twice: the plan is no test"
        assert [str(r.func) for r in seen] == [graph.ops[op].name for op in ran(line)]
        assert proof.measured_peak_bytes == proof.predicted_peak_bytes


def test_more_replays_make_a_lower_peak_than_any_plan_that_replays_once():
    model, x = tanhs(depth=9)
    graph = lowtide.trace(model, x)
    # Of every three tanh outputs one is kept; the others are made anew for each backward that needs them.
    tanh = [s for s in sorted(graph.stored) if graph.ops[graph.storages[s].op].name == "aten.tanh.default"]
    actions = close(graph, [s for i, s in enumerate(tanh) if i % 3 != 2])
    once, often = counted(graph, actions, {}), counted(graph, actions, dict.fromkeys(actions, 9))

    assert lowtide.verify(model, x, often, rounds=0).measured_peak_bytes < once.predicted_peak_bytes


def used_late_and_early() -> tuple[nn.Module, torch.Tensor]:
    """Backward asks for h, then goes through a wide layer, where the peak is, then asks for h again."""

    def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)
        return self.narrow(self.wide(h.sin()).tanh()) * h

    model = Net(forward, layers=1, width=64)
    model.wide, model.narrow = nn.Linear(64, 512), nn.Linear(512, 64)
    return model, torch.randn(128, 64)


def excess(case: Any, count: int) -> int:
    """Measured peak beyond the predicted one, everything dropped and made ``count`` times."""
    model, batch = case()
    plan = drop_all(lowtide.trace(model, batch), count)
    return lowtide.verify(model, batch, plan, rounds=0).measured_peak_bytes - plan.predicted_peak_bytes


def test_a_passing_result_that_stays_is_memory_nobody_predicted(monkeypatch):
    assert excess(tanhs, 3) == 0
    monkeypatch.setattr(bursts.Burst, "_read", lambda self, inputs: None)

    assert excess(tanhs, 3) > 0


def test_a_lent_result_that_the_tape_holds_is_memory_nobody_predicted(monkeypatch):
    run = bursts.Burst.run

    def holding(self: bursts.Burst) -> torch.Tensor:
        self.value.tensor = run(self)
        return self.value.tensor

    assert excess(used_late_and_early, 4) == 0
    monkeypatch.setattr(bursts.Burst, "run", holding)

    assert excess(used_late_and_early, 4) == 128 * 64 * 4  # h


def test_a_lent_result_that_is_not_found_again_is_made_twice(monkeypatch):
    assert excess(mixed, 3) == 0
    monkeypatch.setattr(values.Value, "found_again", lambda self: None)

    assert excess(mixed, 3) > 0


def test_a_recipe_that_a_passing_replay_lets_go_cannot_run_again(monkeypatch):
    read = bursts.Burst._read

    def letting_go(self: bursts.Burst, inputs: Any) -> None:
        read(self, inputs)
        for value in inputs:
            value.is_made_for_good()

    monkeypatch.setattr(bursts.Burst, "_read", letting_go)
    model, x = tanhs()

    with pytest.raises(ReplayError, match="asked for after it had been used up"):
        planned(model, x, drop_all(lowtide.trace(model, x), 3))


# -- backward in every form -------------------------------------------------------------------------------------------


def three_backwards() -> tuple[list[dict[str, Any]], list[int], int]:
    """Outcome and number of replays of each, the last without ``retain_graph``; replayed tensors left by them all."""
    model, x = mixed()
    with lowtide.apply(model, drop_all(lowtide.trace(model, x), 3)):
        loss = model(x).square().mean()
    found, counts, left = [], [], 0
    for retain in (True, True, False):
        model.zero_grad()
        with replays() as seen:
            loss.backward(retain_graph=retain)
        found.append(outcome(model, loss))
        counts.append(len(seen))
        seen.clear()
        left += sum(isinstance(o, values.Value) and getattr(o, "tensor", None) is not None for o in gc.get_objects())
    return found, counts, left


def test_each_backward_over_a_retained_graph_replays_as_often_as_the_plan_says():
    found, counts, left = three_backwards()

    assert differing(found[0], found[1]) == differing(found[0], found[2]) == []
    assert len(set(counts)) == 1
    assert left == 0


def test_a_second_backward_replays_less_and_so_holds_more_if_counts_are_not_given_back(monkeypatch):
    forget = bursts._forget_after_backward
    monkeypatch.setattr(bursts, "_forget_after_backward", lambda made, passed: forget(made, []))

    found, counts, _ = three_backwards()

    assert differing(found[0], found[2]) == []
    assert counts[1] < counts[0]


def test_the_runs_of_a_retained_backward_are_bounded_by_the_counts():
    model, x = mixed()
    graph = lowtide.trace(model, x)
    plan = drop_all(graph, 2)
    with lowtide.apply(model, plan):
        loss = model(x).square().mean()
    for _ in range(2):
        with replays() as seen:
            loss.backward(retain_graph=True)
        assert max(Counter(map(id, seen)).values()) == 2


def test_a_look_from_outside_backward_counts_nothing_and_leaves_nothing():
    model, x = mlp(), torch.randn(4, 16)
    plan = drop_all(lowtide.trace(model, x), 2)
    with lowtide.apply(model, plan):
        out = model(x)
        loss = out.square().mean()
    with replays() as undisturbed:
        planned(model, x, plan, lambda model, x: model(x).square().mean())
    expected = len(undisturbed)
    undisturbed.clear()

    looked = [out.grad_fn._saved_self for _ in range(3)]
    assert all(torch.equal(looked[0], other) for other in looked)
    assert not any(isinstance(o, values.Value) and o.tensor is not None for o in gc.get_objects())
    for tensor in looked:
        tensor.zero_()  # what was looked at is not what backward gets
    with replays() as seen:
        loss.backward()
    assert len(seen) == expected
    assert differing(plain(model, x), outcome(model, loss)) == []


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_backward_in_another_order_than_traced_finds_what_it_needs(order, retain):
    """Branches over one trunk, differentiated one by one: the trunk's counts are used up before the last asks."""
    model, x = mlp(), torch.randn(4, 16)

    def branches(model: nn.Module) -> list[torch.Tensor]:
        trunk = model(x)
        return [trunk.sin().square().mean(), (trunk.exp() * trunk).mean(), trunk.tanh().mean()]

    expected = copy.deepcopy(model)
    torch.stack(branches(expected)).sum().backward()
    for count in (1, 2, 4):
        model.zero_grad()
        plan = drop_all(lowtide.trace(model, x, step=lambda m, x: torch.stack(branches(m)).sum()), count)
        bare = copy.deepcopy(model)
        with lowtide.apply(model, plan) as applied:
            losses = branches(model)
        plain_losses = branches(bare)
        for i in order:
            losses[i].backward(retain_graph=retain or i != order[-1])
            plain_losses[i].backward(retain_graph=True)

        assert applied.counts.dropped
        assert differing(outcome(bare, plain_losses[0]), outcome(model, losses[0])) == []


# -- audit ------------------------------------------------------------------------------------------------------------


def audited(monkeypatch: pytest.MonkeyPatch, count: int) -> tuple[list[str], int]:
    """(What differs from plain when every replay of sin is spoiled and everything audited, comparisons made.)"""
    from lowtide.tape.tape import Audit, Tape

    differences: list[Any] = []
    comparisons: list[bool] = []
    result = Audit.result
    monkeypatch.setattr(
        Audit, "result", lambda self, slot, equal: (comparisons.append(equal), result(self, slot, equal))
    )
    begin = Tape.begin

    def with_audit(self: Tape, node: Any) -> None:
        begin(self, node)
        self.audit = Audit(self.program, 10**9, differences.append)

    monkeypatch.setattr(Tape, "begin", with_audit)
    replay = recipes.Recipe.replay

    def spoilt(self: recipes.Recipe, **how: Any) -> None:
        slot = self.slot
        if self.func is torch.ops.aten.sin.default:
            self.slot = copy.copy(slot)
            self.slot.kernel = lambda x: slot.kernel(x + 1)
        replay(self, **how)
        self.slot = slot

    monkeypatch.setattr(recipes.Recipe, "replay", spoilt)
    model = Net(lambda self, x: self.layers[2](self.layers[1](self.layers[0](x).sin()).sin()).sin())
    x = torch.randn(4, 8)
    plan = drop_all(lowtide.trace(model, x), count)
    differs = differing(plain(model, x), planned(model, x, plan))
    assert differences
    return differs, len(comparisons)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_an_audit_found_to_differ_stays_for_every_later_use(monkeypatch, count):
    differs, comparisons = audited(monkeypatch, count)

    assert differs == []
    assert comparisons == audited_once()


def audited_once() -> int:
    """Dropped outputs of the audited model: three linears' and the two sines that a linear reads."""
    return 5


def test_what_an_audit_found_to_differ_is_wrong_again_if_it_is_not_kept(monkeypatch):
    audit = recipes.Recipe._audit

    def forgetting(self: recipes.Recipe, value: values.Value) -> None:
        with monkeypatch.context() as during:
            during.setattr(recipes.Recipe, "is_made_for_good", lambda self: None)
            audit(self, value)

    monkeypatch.setattr(recipes.Recipe, "_audit", forgetting)

    differs, _ = audited(monkeypatch, 3)

    assert differs
