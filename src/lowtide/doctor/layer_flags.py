"""How checkpointing of transformers' layers is switched on, for a while: by a flag in each layer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from lowtide.settings.carried_out import settings_kept
from lowtide.settings.checkpointing_names import enable
from lowtide.settings.transformers import is_layer


def layer_flags(model: nn.Module) -> dict[str, bool]:
    """Whether each layer is checkpointed, by its path, in the model's order."""
    return {n: bool(getattr(m, "gradient_checkpointing", False)) for n, m in model.named_modules() if is_layer(m)}


@contextmanager
def flags_set(model: Any, flags: Mapping[str, bool]) -> Iterator[None]:
    """Inside, the layers are checkpointed where ``flags`` says so."""
    with settings_kept(model):
        enable(model, {"use_reentrant": False})
        for path, flag in flags.items():
            model.get_submodule(path).gradient_checkpointing = flag
        yield


@contextmanager
def enabled_by_train(model: Any, on: bool, options: Mapping[str, Any] | None) -> Iterator[None]:
    """Inside, checkpointing is as ``Trainer.train()`` would set it (transformers 5.23 trainer.py:1503).

    Args:
        on, options: What the arguments ask for (``asked_in``); False leaves the model as it is.
    """
    with settings_kept(model):
        if on:
            given = dict(options or {})
            every, offload = given.pop("every_n_layers", 1), given.pop("offload", False)
            enable(model, given or None, every_n_layers=every, offload=offload)
        yield
