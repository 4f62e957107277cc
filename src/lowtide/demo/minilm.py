"""Case (a): real pretrained all-MiniLM-L6-v2 weights, tuned on sentences with the SimCSE objective.

Gao, Yao and Chen 2021, "SimCSE: Simple Contrastive Learning of Sentence Embeddings", EMNLP,
https://aclanthology.org/2021.emnlp-main.552

One sentence passes the encoder twice; dropout alone makes the two embeddings differ, and each must find its twin among
the batch's other sentences. It has what checkpointing tools stumble over: random masks, one module called twice in a
step, padded batches of several lengths, a loss outside the model.
"""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.demo.case import Case
from lowtide.demo.extras import minilm_folder, quiet_transformers
from lowtide.demo.text import sentences

# The paper's 0.05 leaves these weights nothing to learn from 16 sentences: they tell them apart already.
_TEMPERATURE = 0.2


def simcse_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """InfoNCE between two passes of the same sentences, mean-pooled over the real tokens."""
    first, second = _embed(model, batch), _embed(model, batch)
    similarity = first @ second.T / _TEMPERATURE
    return F.cross_entropy(similarity, torch.arange(len(similarity), device=similarity.device))


def _embed(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens = model(**batch).last_hidden_state
    real = batch["attention_mask"].unsqueeze(-1).to(tokens.dtype)
    return F.normalize((tokens * real).sum(1) / real.sum(1), dim=-1)


def minilm_case(*, quick: bool = False) -> Case:
    """Load the weights and the sentences; ``quick`` keeps two of six layers and small batches, for tests.

    Raises:
        MissingExtraError: transformers or the weights are not installed.
    """
    transformers = quiet_transformers()
    folder = minilm_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).train()
    if quick:
        model.encoder.layer = model.encoder.layer[:2]
    rows, count = (12, 2) if quick else (10, 6)
    batches = _batches(tokenizer, rows, count)
    longest = max(batches, key=lambda batch: batch["input_ids"].shape[1])
    return Case(
        name="all-MiniLM-L6-v2, SimCSE",
        facts="pretrained weights, dropout 0.1, the loss computed outside the model, fp32",
        model=model,
        step=simcse_loss,
        batch=longest,
        training=tuple(batches),
        training_steps=4 if quick else 24,
        learning_rate=5e-5,
        training_budget="90%" if quick else "50%",
        budgets=("95%", "90%") if quick else ("70%", "50%"),
    )


def _batches(tokenizer: Any, rows: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of like length together, padded to the longest of them in steps of 32; the batches shuffled."""
    corpus = sorted(sentences()[: rows * count], key=len)
    pieces = [corpus[i : i + rows] for i in range(0, len(corpus), rows)]
    random.Random(0).shuffle(pieces)
    settings = dict(padding=True, pad_to_multiple_of=32, truncation=True, max_length=64, return_tensors="pt")
    return [dict(tokenizer(piece, **settings)) for piece in pieces]
