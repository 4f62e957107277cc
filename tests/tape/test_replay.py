"""The tape replays an op as often as the plan says: bytes, bits, backward in every form."""

from __future__ import annotations

import copy
import gc
import random
from collections import Counter
from typing import Any

import pytest
import torch
from support.toy_graphs import unit_costs
from support.training_steps import Net, counted, differing, drop_all, mlp, outcome, plain, planned, ran, replays
from torch import nn

import lowtide
from lowtide import ReplayError
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import RECOMPUTE, Plan
from lowtide.simulation.simulator import simulate
from lowtide.solvers.graph_queries import complete_actions, recomputable
from lowtide.tape import replay, values


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


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
        actions = complete_actions(graph, [s for s in free if s in graph.stored and dice.random() < share], kept)
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
        assert [str(r.op.func) for r in seen] == [graph.ops[op].name for op in ran(line)]
        assert proof.measured_peak_bytes == proof.predicted_peak_bytes


def test_more_replays_make_a_lower_peak_than_any_plan_that_replays_once():
    model, x = tanhs(depth=9)
    graph = lowtide.trace(model, x)
    # Of every three tanh outputs one is kept; the others are replayed for each backward that needs them.
    tanh = [s for s in sorted(graph.stored) if graph.ops[graph.storages[s].op].name == "aten.tanh.default"]
    actions = complete_actions(graph, [s for i, s in enumerate(tanh) if i % 3 != 2])
    once, often = counted(graph, actions, {}), counted(graph, actions, dict.fromkeys(actions, 9))

    assert lowtide.verify(model, x, often, rounds=0).measured_peak_bytes < once.predicted_peak_bytes


def used_late_and_early() -> tuple[nn.Module, torch.Tensor]:
    """Backward unpacks h, then runs a wide layer, where the peak is, then unpacks h again."""

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


def test_a_transient_result_that_stays_is_memory_nobody_predicted(monkeypatch):
    assert excess(tanhs, 3) == 0
    monkeypatch.setattr(replay.Burst, "_read", lambda self, inputs: None)

    assert excess(tanhs, 3) > 0


def test_a_transient_result_that_the_tape_holds_is_memory_nobody_predicted(monkeypatch):
    run = replay.Burst.run

    def holding(self: replay.Burst) -> torch.Tensor:
        self.value.tensor = run(self)
        return self.value.tensor

    assert excess(used_late_and_early, 4) == 0
    monkeypatch.setattr(replay.Burst, "run", holding)

    assert excess(used_late_and_early, 4) == 128 * 64 * 4  # h


def test_a_transient_result_that_is_not_found_again_is_made_twice(monkeypatch):
    assert excess(mixed, 3) == 0
    monkeypatch.setattr(values.Value, "transient_tensor", lambda self: None)

    assert excess(mixed, 3) > 0


def test_a_recipe_that_a_transient_replay_lets_go_cannot_run_again(monkeypatch):
    read = replay.Burst._read

    def letting_go(self: replay.Burst, inputs: Any) -> None:
        read(self, inputs)
        for value in inputs:
            value.make_final()

    monkeypatch.setattr(replay.Burst, "_read", letting_go)
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
        left += sum(isinstance(o, values.Value) and o.tensor is not None for o in gc.get_objects())
    return found, counts, left


def test_each_backward_over_a_retained_graph_replays_as_often_as_the_plan_says():
    found, counts, left = three_backwards()

    assert differing(found[0], found[1]) == differing(found[0], found[2]) == []
    assert len(set(counts)) == 1
    assert left == 0


def test_a_second_backward_replays_less_and_so_holds_more_if_counts_are_not_given_back(monkeypatch):
    forget = replay._forget_after_backward
    monkeypatch.setattr(replay, "_forget_after_backward", lambda made, passed: forget(made, []))

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
    """Branches over one trunk, differentiated one by one: the trunk's counts are used up before the last unpacks."""
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
