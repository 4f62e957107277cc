"""TRL switches checkpointing off around a pass without gradients, and on again without ``every_n_layers``."""

import importlib
from typing import Any, cast

import torch

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.layer_flags import enabled_by_train, flags_set, layer_flags
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.settings.checkpointing_names import asked_in, can_enable, word_of

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


def find(setup: StepUnderTest) -> Finding | None:
    arguments, model = setup.arguments, cast(Any, setup.model)
    if not any(c.__name__ in _CONFIGS and c.__module__.startswith("trl.") for c in type(arguments).__mro__):
        return None
    asked, options = asked_in(arguments)
    if not asked or not can_enable(model):
        return None
    utils = importlib.import_module("trl.models.utils")
    with enabled_by_train(model, True, options):
        started = layer_flags(model)
        with torch.no_grad(), utils.disable_gradient_checkpointing(model, arguments.gradient_checkpointing_kwargs):
            pass
        after = layer_flags(model)
    if after == started:
        return None
    every = options.pop("every_n_layers", 1)
    options.pop("offload", None)
    keep = options or {"use_reentrant": False}
    return CHECK.found(
        f"train() makes {sum(started.values())} of {len(after)} layers checkpointed; after TRL's own off and on it is "
        f"{sum(after.values())}",
        gain=setup.gain(lambda: flags_set(model, started), lambda: flags_set(model, after)),
        fix=f"enable = model.{word_of(model)}_enable\n"
        f"model.{word_of(model)}_enable = lambda *_, **__: enable({keep!r}, every_n_layers={every})",
    )
