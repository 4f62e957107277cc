"""Toys that a training loop feeds with batches of other lengths: their graphs, and families of handmade ones."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from support.toy_graphs import decoder, decoder_costs

import lowtide
from lowtide.graph.step_graph import StepGraph
from lowtide.shapes.shape_family import ShapeFamily

VOCABULARY = 64
# Tokens of a length: CUDA's attention counts in blocks of 64, and a CPU's takes another workspace from 192 tokens on.
TOKENS = 4 if torch.get_default_device().type == "cuda" else 1
MODELS = ("llama", "gpt2", "bert")


@cache
def model_of(kind: str, layers: int = 2) -> torch.nn.Module:
    """A tiny model with random weights, in training mode."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    settings: dict[str, Any] = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if kind == "gpt2":
        settings |= dict(n_embd=32, n_layer=layers, n_head=4)
    else:
        settings |= dict(
            hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2
        )
    if kind == "bert":
        settings |= dict(max_position_embeddings=1024)
    make = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    torch.manual_seed(0)
    return make.from_config(AutoConfig.for_model(kind, **settings)).train()


@cache
def watched(kind: str, batch: int, length: int, *, padded: bool, layers: int = 2) -> StepGraph:
    """The traced step of one batch; of a padded one the first row is half as long."""
    length *= TOKENS
    ids = torch.randint(
        3, VOCABULARY, (batch, length), generator=torch.Generator(torch.get_default_device()).manual_seed(length)
    )
    inputs = dict(input_ids=ids, labels=ids)
    if padded:
        inputs["attention_mask"] = torch.ones(batch, length, dtype=torch.long)
        inputs["attention_mask"][0, length // 2 :] = 0
    torch.set_num_threads(1)
    return lowtide.trace(model_of(kind, layers), inputs)


def decoder_of(batch: int, length: int, layers: int = 3) -> StepGraph:
    """The handmade decoder on ``batch`` times ``length`` tokens."""
    return replace(decoder(layers=layers, tokens=batch * length), resident={"parameters": 1000})


def decoder_family(*shapes: tuple[int, int], layers: int = 3) -> ShapeFamily:
    """Its family, with costs."""
    family = ShapeFamily()
    for shape in shapes:
        graph = decoder_of(*shape, layers=layers)
        family.add(shape, graph, decoder_costs(graph))
    return family
