"""TRL switches checkpointing off around a pass without gradients, and on again without ``every_n_layers``."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from lowtide.doctor.finding import Check, Finding, Gain
from lowtide.doctor.setup import Setup

CHECK = Check(
    code="LT110",
    severity="waste",
    title="every_n_layers is gone after TRL's first generation",
    symptom="from the second step on all layers are recomputed; steps are slower than the first",
    source="trl 1.16 models/utils.py:153 and 403 (on again with gradient_checkpointing_kwargs alone)",
    mend="Bind every_n_layers to the model's own method, which TRL calls too, and leave it out of the arguments.",
)
# Their trainers generate, or compare with a reference, in every step.
_CONFIGS = ("GRPOConfig", "RLOOConfig")


def look(setup: Setup) -> Finding | None:
    arguments, model = setup.arguments, cast(Any, setup.model)
    if not any(c.__name__ in _CONFIGS and c.__module__.startswith("trl.") for c in type(arguments).__mro__):
        return None
    if not arguments.activation_checkpointing or not hasattr(model, "activation_checkpointing_enable"):
        return None
    utils = importlib.import_module("trl.models.utils")
    options = dict(arguments.activation_checkpointing_kwargs or {})
    every, offload = options.pop("every_n_layers", 1), options.pop("offload", False)
    with _settings_kept(model):
        model.activation_checkpointing_enable(options or None, every_n_layers=every, offload=offload)  # as train() does
        started = _on(model)
        with torch.no_grad(), utils.disable_gradient_checkpointing(model, arguments.gradient_checkpointing_kwargs):
            pass
        after = _on(model)
    if after == started:
        return None
    keep = options or {"use_reentrant": False}
    return CHECK.found(
        f"train() makes {sum(started.values())} of {len(after)} layers checkpointed; after TRL's own off and on it is "
        f"{sum(after.values())}",
        gain=_gain(setup, started, after) if setup.failure is None else "",
        fix="enable = model.activation_checkpointing_enable\n"
        f"model.activation_checkpointing_enable = lambda *_, **__: enable({keep!r}, every_n_layers={every})",
    )


def _on(model: nn.Module) -> dict[str, bool]:
    """The flags of the layers, by path."""
    layers = (
        (n, m) for n, m in model.named_modules()
        if any(c.__name__ == "GradientCheckpointingLayer" for c in type(m).__mro__)
    )  # fmt: skip
    return {n: bool(getattr(m, "gradient_checkpointing", False)) for n, m in layers}


def _gain(setup: Setup, started: dict[str, bool], after: dict[str, bool]) -> Gain:
    def flags(on: dict[str, bool]) -> Any:
        return lambda: _flagged(setup.model, on)

    return setup.gain(flags(started), flags(after))


@contextmanager
def _flagged(model: Any, on: dict[str, bool]) -> Iterator[None]:
    with _settings_kept(model):
        model.activation_checkpointing_enable({"use_reentrant": False})
        for path, flag in on.items():
            model.get_submodule(path).gradient_checkpointing = flag
        yield


@contextmanager
def _settings_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards checkpointing is set as before: flags, functions, and the hooks that come with them."""
    before = [(vars(m), dict(vars(m)), dict(m._forward_hooks)) for m in model.modules()]
    try:
        yield
    finally:
        for attributes, values, hooks in before:
            attributes.clear()
            attributes.update(values)
            attributes["_forward_hooks"].clear()
            attributes["_forward_hooks"].update(hooks)
