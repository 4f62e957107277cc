"""Architectures of transformers at a small size: a few thousand random weights, and a batch with a loss.

An architecture that cannot be built says nothing about lowtide; it is missing in this file or in ``configs.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zoo import batches
from zoo.configs import small

TOKENS, ROWS = 12, 2


class CannotBuild(Exception):
    """This file knows no small configuration or no batch for the architecture."""


@dataclass(frozen=True)
class Architecture:
    """A model, its batch (keyword arguments, labels among them), and the class's name."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    name: str


TASKS = {  # task -> transformers' mapping of model types to classes
    "causal language": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked language": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "semantic segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "video classification": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "speech recognition (CTC)": "MODEL_FOR_CTC_MAPPING_NAMES",
    "speech to text": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "audio classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "image and text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}


def names() -> Iterator[tuple[str, str]]:
    """Yield task and model type of every architecture; each class once, under the first task that lists it."""
    from transformers.models.auto import modeling_auto

    seen: set[str] = set()
    for task, mapping in TASKS.items():
        types_of: dict[str, list[str]] = {}
        for model_type, classes in getattr(modeling_auto, mapping).items():
            types_of.setdefault(classes if isinstance(classes, str) else classes[0], []).append(model_type)
        for name, types in types_of.items():
            if name not in seen:
                seen.add(name)
                own = [t for t in types if name.lower().startswith(t.replace("-", "").replace("_", ""))]
                yield task, (own or types)[0]


def build(task: str, model_type: str, *, dropout: float | None = None) -> Architecture:
    """The architecture, small and with the same weights each time.

    Args:
        dropout: Replaces every dropout rate of the configuration; None leaves them.

    Raises:
        CannotBuild: no small configuration, or no batch, is known.
    """
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    classes = getattr(modeling_auto, TASKS[task])[model_type]
    name = classes if isinstance(classes, str) else classes[0]
    try:
        model_class = getattr(transformers, name)
        config = small(getattr(model_class, "config_class", None) or CONFIG_MAPPING[model_type], dropout)
        torch.manual_seed(0)
        _as_task(config, task)
        count = _weights(model_class, config)
        if count > 30_000_000:
            raise CannotBuild(f"{count / 1e6:.0f} million weights are left of it")
        model = model_class(config).float().train()
        batch = batches.first_taken(model, batches.batches(task, config, model))
    except CannotBuild:
        raise
    except Exception as error:
        raise CannotBuild(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    return Architecture(model, batch, name)


def _as_task(config: Any, task: str) -> None:
    """Set what the task requires and the configuration leaves open."""
    if task in ("sequence to sequence", "speech to text", "image and text"):
        for name, value in (("decoder_start_token_id", 1), ("pad_token_id", 0)):
            if getattr(config, name, None) is None:
                setattr(config, name, value)
    if task == "causal language" and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True


def _weights(model_class: Any, config: Any) -> int:
    """How many weights, without making them; 0 where the model reads values when it is made."""
    state = torch.get_rng_state()
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in model_class(config).parameters())
    except Exception:
        return 0
    finally:
        torch.set_rng_state(state)
