"""What transformers calls checkpointing: ``gradient_checkpointing`` up to 5.22, ``activation_checkpointing`` since."""

import inspect
from collections.abc import Mapping
from typing import Any

NEW, OLD = "activation_checkpointing", "gradient_checkpointing"


def word_of(model: Any) -> str:
    """Of a model's methods: ``{word}_enable``."""
    return NEW if hasattr(model, f"{NEW}_enable") else OLD


def can_enable(model: Any) -> bool:
    """Whether it has transformers' own switch: other libraries have one of the old name that takes something else."""
    method = getattr(model, f"{word_of(model)}_enable", None)
    return method is not None and "every_n_layers" in inspect.signature(method).parameters


def enable(model: Any, options: Mapping[str, Any] | None = None, **layers: Any) -> None:
    """Switch it on as transformers does; ``layers``: ``every_n_layers``, ``offload``."""
    getattr(model, f"{word_of(model)}_enable")(options, **layers)


def word_in(arguments: Any) -> str:
    """Of ``TrainingArguments``: the name that their Trainer reads."""
    return NEW if hasattr(arguments, f"{NEW}_kwargs") else OLD


def asked_in(arguments: Any) -> tuple[bool, dict[str, Any]]:
    """Whether ``TrainingArguments`` switch checkpointing on, and its options."""
    word = word_in(arguments)
    return bool(getattr(arguments, word, False)), dict(getattr(arguments, f"{word}_kwargs", None) or {})
