"""DeepSpeed's ``activation_checkpointing`` section, which takes effect only where code calls DeepSpeed's checkpoint."""

from lowtide.doctor.finding import Check, Finding, Gain
from lowtide.doctor.layer_flags import enabled_by_train
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.settings.blocks import blocks
from lowtide.settings.carried_out import checkpointed_modules
from lowtide.settings.checkpointing_names import can_enable

CHECK = Check(
    code="LT109",
    severity="waste",
    title="DeepSpeed's activation_checkpointing settings do nothing",
    symptom="partition_activations or cpu_checkpointing changes no number",
    source="DeepSpeed#5704, DeepSpeed#522, transformers#22099",
    mend="Call deepspeed.checkpointing.configure and deepspeed.checkpointing.checkpoint in the model's code, or switch "
    "checkpointing on by the model's own method and remove the section.",
    fix='del config["activation_checkpointing"]',
)


def find(setup: StepUnderTest) -> Finding | None:
    config = getattr(setup.wrapper, "_config", None)
    given = getattr(config, "_param_dict", None)
    section = given.get("activation_checkpointing") if isinstance(given, dict) else None
    asked = {k: v for k, v in section.items() if v} if isinstance(section, dict) else {}
    # DeepSpeed's own checkpoint is a node of this name that is none of torch's.
    own = "CheckpointFunctionBackward" in setup.seen.nodes and not any(c.reentrant for c in setup.calls)
    if not asked or own:
        return None
    told = ", ".join(f"{k}={v!r}" for k, v in asked.items())
    return CHECK.found(
        f"{told} in the configuration; no call of deepspeed.checkpointing.checkpoint in the step", gain=_gain(setup)
    )


def _gain(setup: StepUnderTest) -> Gain | str:
    """Of checkpointing the layers, which the section was meant to shape."""
    model = setup.model
    if setup.calls:
        return "none: the layers are checkpointed by torch already"
    if can_enable(model):
        return setup.gain(lambda: enabled_by_train(model, True, None))
    layers = [model.get_submodule(path) for path in blocks(model) if setup.seen.called[path]]
    if not layers:
        return Gain(why_not="no layers that repeat were found to checkpoint")
    return setup.gain(lambda: checkpointed_modules(layers))
