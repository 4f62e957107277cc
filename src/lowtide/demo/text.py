"""Real text that every Python carries: the language reference behind ``help("topics")``."""

import re
from collections.abc import Iterator
from pydoc_data import topics

import torch

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def reference_text() -> str:
    """All topics in their order, about 470 kB of English with Python examples."""
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


def subword_ids(vocabulary: int) -> torch.Tensor:
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
