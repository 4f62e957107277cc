"""Runs in the process of ``test_megatron.py``: a small GPT of Megatron-Core in a plain loop, told as plain values."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from support.megatron_on_cpu import gpt, seed, use_megatron
from support.ranks import digest
from support.watched_training import resident_bytes

import lowtide
from lowtide.measurement.allocator import peak_bytes

WORDS, ROWS, LENGTH = 128, 8, 64
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
WAYS: dict[str, dict[str, Any]] = {
    "without dropout": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "hidden dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.0},
    "attention dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
}
RECOMPUTING: dict[str, dict[str, Any]] = {
    "full": FULL,
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


def alone(rank: int, ways: Collection[str], recomputing: Collection[str]) -> dict[tuple[str, str], tuple[dict, ...]]:
    """Plain and fitted; with Megatron's own recomputation on: plain, fitted, and fitted beside it."""
    use_megatron()
    told: dict[tuple[str, str], tuple[dict, ...]] = {}
    for way in ways:
        told["trained", way] = train(**WAYS[way]), train(budget="60%", **WAYS[way])
    for way in recomputing:
        how = RECOMPUTING[way]
        kept = train(budget="90%", checkpointing="keep", steps=2, **how)
        told["recomputing", way] = train(**how), train(budget="60%", **how), kept
    return told


def train(*, budget: Any = None, steps: int = 6, checkpointing: str = "replace", **settings: Any) -> dict:
    model = gpt(words=WORDS, longest=LENGTH, **settings).train()
    fit = lowtide.fit(model, budget=budget, checkpointing=checkpointing) if budget is not None else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not()
    seed(3)
    losses, peaks = [], []

    def step() -> None:
        loss = model(ids, positions, mask, labels=ids).float().mean()
        loss.backward()
        losses.append(loss.item())

    for i in range(steps):
        ids = torch.randint(
            0, WORDS, (ROWS, LENGTH), generator=torch.Generator(torch.get_default_device()).manual_seed(i)
        )
        # positions are expanded: 4096 bytes of a storage of 512
        there = resident_bytes(model) + sum(t.untyped_storage().nbytes() for t in (ids, positions, mask))
        peaks.append(there + peak_bytes(step))
        optimizer.step()
        optimizer.zero_grad()
        if fit is not None and i == 1:
            fit.wait(60)
    told = {"losses": losses, "weights": digest(p.float() for p in model.parameters()), "peaks": peaks}
    if fit is not None:
        told |= {"status": fit.status(), "plan": fit.plan, "was": _switches(model)}
        told["mismatched"] = sum(p.tape.counts.mismatched for p in fit._lifecycle.plans_by_shape.plans)
        fit.remove()
    return told | {"is": _switches(model)}


def _switches(model: Any) -> tuple[str | None, bool]:
    return model.config.recompute_granularity, model.decoder.layers[0].self_attention.checkpoint_core_attention
