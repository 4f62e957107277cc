"""A deep model's graph from a shallow one's is the graph that a trace of the deep model gives."""

from dataclasses import replace

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig

import lowtide
from lowtide.graph.costs import Costs
from lowtide.graph.repeated_layers import SHALLOW_LAYERS, _in_order, with_layers
from lowtide.hollow.models import language_batch
from lowtide.simulation.simulator import simulate_actions

DEEP = SHALLOW_LAYERS + 3
SIZES = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, vocab_size=128,
             max_position_embeddings=64)  # fmt: skip


def traced(layers, *, kind=LlamaConfig, device="h100", autocast=False, **config):
    def step(model, batch):
        with torch.autocast("cpu" if device == "cpu" else "cuda", torch.bfloat16, enabled=autocast):
            return model(**batch).loss

    config = kind(num_hidden_layers=layers, **SIZES, **config)
    return lowtide.trace(config, language_batch(2, 16), step=step, device=device)


@pytest.mark.parametrize(
    "how",
    [{"device": "h100"}, {"device": "h100", "autocast": True}, {"device": "cpu", "attn_implementation": "eager"}],
    ids=["fused", "autocast", "on the CPU, eager"],
)
def test_a_deep_model_is_a_shallow_one_with_a_layer_repeated(how):
    deep = traced(DEEP, **how)

    found = with_layers(traced(SHALLOW_LAYERS, **how), DEEP)

    assert found.fingerprint == _in_order(deep).fingerprint
    costs = Costs((1.0,) * len(deep.ops))
    assert simulate_actions(found, costs, {}).peak_bytes == simulate_actions(deep, costs, {}).peak_bytes


def test_layers_that_take_turns_are_not_repeated():
    assert with_layers(traced(SHALLOW_LAYERS, kind=Gemma2Config, head_dim=16), DEEP) is None


@pytest.mark.parametrize("what", ["a workspace", "a storage", "an event"])
def test_one_layer_that_differs_in_anything_is_noticed(what):
    graph = traced(SHALLOW_LAYERS)
    op = next(op for op in graph.ops if graph.scope(op).endswith("layers.2.mlp.up_proj") and op.makes)
    if what == "a workspace":
        graph = replace(graph, ops=tuple(replace(o, workspace_bytes=7) if o is op else o for o in graph.ops))
    elif what == "a storage":
        storages = [replace(s, bytes=s.bytes + 512) if s.id == op.makes[0] else s for s in graph.storages]
        graph = replace(graph, storages=tuple(storages))
    else:
        at = graph.events.index((0, op.id))
        graph = replace(graph, events=(*graph.events[: at + 1], (1, op.makes[0]), *graph.events[at + 1 :]))

    assert with_layers(graph, DEEP) is None


def test_a_model_cannot_lose_layers():
    assert with_layers(traced(SHALLOW_LAYERS), SHALLOW_LAYERS - 1) is None
