"""Options that a model handed on to ``checkpoint``, which hands them to the layer, which ignores them."""

import functools
import inspect
from typing import Any

from torch.utils.checkpoint import checkpoint

from lowtide.doctor import checkpoint_seam
from lowtide.doctor.finding import Check, Finding, Gain
from lowtide.doctor.step_listener import CheckpointCall
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.settings.checkpointing_names import word_of

CHECK = Check(
    code="LT103",
    severity="waste",
    title="checkpointing options that reach nobody",
    symptom="every_n_layers=2 checkpoints all layers, without a word",
    source="transformers 5.23 modeling_utils.py:3110 (kwargs go to checkpoint, and on to the layer's **kwargs)",
    mend="Pass every_n_layers and offload as arguments of activation_checkpointing_enable, beside the dictionary.",
)
_KNOWN = {*inspect.signature(checkpoint).parameters, "preserve_rng_state"} - {"args", "kwargs", "function"}


def find(setup: StepUnderTest) -> Finding | None:
    for path, module in setup.model.named_modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if path not in setup.flagged or not isinstance(function, functools.partial):
            continue
        unknown = {k: v for k, v in function.keywords.items() if k not in _KNOWN}
        if unknown and setup.calls:
            known = {k: v for k, v in function.keywords.items() if k in _KNOWN}
            told = ", ".join(f"{k}={v!r}" for k, v in unknown.items())
            layers = [c for c in setup.calls if c.parent is None]
            return CHECK.found(
                f"{told} went into the options of torch.utils.checkpoint, which does not know it; {len(layers)} calls "
                "are checkpointed all the same",
                gain=_gain(setup, layers, unknown.get("every_n_layers")),
                fix=f"model.{word_of(setup.model)}_enable({known!r}, {told})",
            )
    return None


def _gain(setup: StepUnderTest, layers: list[CheckpointCall], every: Any) -> Gain:
    """Of the layers that were to be plain; of ``offload`` there is none to be had here."""
    if not isinstance(every, int) or every < 2 or len(layers) != len(setup.calls) or setup.failure is not None:
        return Gain()
    spared = {c.number for i, c in enumerate(layers) if i % every}
    return setup.gain(lambda: checkpoint_seam.plain_calls(spared))
