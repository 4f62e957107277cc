"""What a layer saves, planned by lowtide's solver over its joint graph."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.compiled_layers import layer_graph_of
from torch.nn import functional as F

from lowtide.compiled import layer_calls, saved_sets
from lowtide.compiled.layer_calls import LayerShape
from lowtide.compiled.layer_graph import DRAWN
from lowtide.solvers.dispatch import solve

KIB = 1024


def feed_forward(x, up, down):
    return x + F.gelu(x @ up) @ down


def inputs():
    # 16 KiB for ``x``, four times as much for the wide value.
    return [
        torch.randn(128, 32, requires_grad=True),
        *(torch.randn(s, requires_grad=True) for s in ((32, 128), (128, 32))),
    ]


@pytest.fixture(scope="module")
def layer():
    return layer_graph_of(feed_forward, *inputs())


def test_the_joint_graph_stores_what_its_formula_says(layer):
    stored = sum(layer.graph.storages[s].bytes for s in layer.graph.stored)

    # Before and after the gelu; the layer's own input is there anyway.
    assert stored == 2 * 64 * KIB


def test_the_least_set_saves_nothing_and_computes_again_what_it_needs(layer):
    least = saved_sets.least(layer)

    assert least.names == () and least.stored_bytes == 0
    assert least.recompute_ms > 0


def test_the_front_goes_from_nothing_saved_to_nothing_computed_again(layer):
    front = saved_sets.front(layer)

    assert front[0].stored_bytes == 0 and front[-1].recompute_ms == 0
    by_time = sorted(front, key=lambda s: s.recompute_ms)
    assert all(a.stored_bytes >= b.stored_bytes or a.backward_bytes >= b.backward_bytes
               for a, b in itertools.pairwise(by_time))  # fmt: skip


def test_what_selective_checkpointing_keeps_is_in_the_front(layer, monkeypatch):
    monkeypatch.setattr(saved_sets, "within", lambda *_: None)

    (selective,) = saved_sets.front(layer)

    made_by = {layer.names[s.id]: layer.graph.ops[s.op].name for s in layer.graph.storages if s.id in layer.names}
    assert selective.stored_bytes == 64 * KIB and selective.recompute_ms > 0
    assert [made_by[name] for name in selective.names] == ["aten.mm.default"]


def test_no_set_saves_an_input_in_another_dtype(monkeypatch):
    def projected(x, w):
        return F.gelu(x.float() @ w)

    narrow = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    layer = layer_graph_of(projected, narrow, torch.randn(64, 64, requires_grad=True))

    def saved():
        return [name for found in saved_sets.front(layer) for name in found.names]

    assert saved() and not any("_to_copy" in name for name in saved())
    monkeypatch.setattr(saved_sets, "_casts_of_inputs", lambda _: [])
    assert any("_to_copy" in name for name in saved())


def test_a_residuals_gradient_is_written_in_each_layer():
    # Under autocast products read casts of it alone. Were it one kernel, all that it adds up would live to the end.
    def residual(x, *weights):
        for weight in weights:
            normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            x = x + (normed.bfloat16() @ weight).float()
        return x

    weights = [torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(8)]
    graph = layer_graph_of(residual, torch.randn(64, 64, requires_grad=True), *weights).graph

    assert max(len(op.reads) for op in graph.ops if op.backward) < len(weights)


def test_a_bound_on_stored_bytes_holds(layer):
    found = saved_sets.within(layer, 64 * KIB, None)

    assert found is not None and found.stored_bytes <= 64 * KIB
    assert found.recompute_ms < saved_sets.least(layer).recompute_ms


def test_slack_lets_a_budget_bind_at_the_turn(layer):
    # Everything stored and 1 MiB of the rest of the model: one byte less is not enough.
    graph = layer.with_slack(1 << 20)

    everything = solve(graph, layer.costs, (1 << 20) + 128 * KIB)
    less = solve(graph, layer.costs, (1 << 20) + 128 * KIB - 1)

    assert everything.counts["recompute"] == 0 and less.counts["recompute"] > 0


def test_what_is_drawn_from_a_generator_is_saved():
    layer = layer_graph_of(
        lambda x, w: (x @ w) * torch.rand_like(x), *inputs()[:1], torch.randn(32, 32, requires_grad=True)
    )
    drawn = [s for s in layer.graph.storages if s.fixed == DRAWN]

    assert drawn and all(layer.names[s.id] in saved_sets.least(layer).names for s in drawn)


def test_a_seed_is_saved_in_place_of_the_masks_that_are_drawn_from_it():
    prims = torch.ops.prims

    def dropped(x, w):
        seed = prims.inductor_lookup_seed(prims.inductor_seeds(1, torch.device("cpu")), 0)
        return torch.where(prims.inductor_random([64, 64], seed, "rand") > 0.3, F.gelu(x @ w), 0.0) @ w

    layer = layer_graph_of(dropped, *(torch.randn(64, 64, requires_grad=True) for _ in range(2)))
    least = saved_sets.least(layer)

    assert [layer.graph.ops[layer.graph.storages[s].op].name for s in layer.names if layer.names[s] in least.names] == [
        "prims.inductor_seeds.default"
    ]
    assert least.stored_bytes == 8 and least.recompute_ms > 0


def test_sets_for_any_limit_and_pytorchs_own_are_proposed_once(layer, monkeypatch):
    shape, made = object.__new__(LayerShape), []
    mine, theirs = saved_sets.least(layer), saved_sets.saving(layer, ())

    def counted(found):
        made.append(found)
        return [found]

    shape.captured = SimpleNamespace(layer=layer, sends=False, pytorchs_sets=lambda: counted(theirs))
    shape.variants, shape.proposed, shape.unreadable, shape._has_front = {}, {}, {}, False
    monkeypatch.setattr(layer_calls, "front", lambda _: counted(replace(mine, names=("mine",))))
    shape.propose_front()
    assert [s.names for s in shape.proposed.values()] == [("mine",), theirs.names] and len(made) == 2
    shape.propose_front()
    assert len(made) == 2

    shape.captured.sends, shape._has_front = True, False
    shape.propose_front()
    assert len(made) == 3, "what ranks send is saved, so what PyTorch would make again is of no use"
