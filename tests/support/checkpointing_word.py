"""Checkpointing under the name that the installed transformers has for it."""

from typing import Any

from transformers import PreTrainedModel

from lowtide.settings.checkpointing_names import word_of

WORD = word_of(PreTrainedModel)


def asking(**options: Any) -> dict[str, Any]:
    """Keywords of ``TrainingArguments`` that switch it on."""
    return {WORD: True, **({f"{WORD}_kwargs": options} if options else {})}


def is_on(model: Any) -> bool:
    return bool(getattr(model, f"is_{WORD}"))
