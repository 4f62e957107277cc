"""A Trainer switches checkpointing on again when it starts, and forgets how the user had set it."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.setup import Setup

CHECK = Check(
    code="LT104",
    severity="waste",
    title="the Trainer will overwrite the model's checkpointing settings",
    symptom="every_n_layers is lost at train(), and in TRL after each generation",
    source="transformers#26221; transformers 5.23 trainer.py:1503; trl 1.16 models/utils.py:138-154",
    mend="Say it in the Trainer's arguments instead.",
)


def look(setup: Setup) -> Finding | None:
    arguments = setup.arguments
    if arguments is None or not getattr(arguments, "activation_checkpointing", False):
        return None
    layers = _layers(setup)
    on = sum(layers)
    every = (arguments.activation_checkpointing_kwargs or {}).get("every_n_layers", 1)
    after = len(range(0, len(layers), every))
    if not 0 < on < len(layers) or on == after:
        return None
    wanted = round(len(layers) / on)
    return CHECK.found(
        f"{on} of {len(layers)} layers are checkpointed now; with these arguments train() makes it {after}",
        fix=f"TrainingArguments(..., activation_checkpointing_kwargs={{'every_n_layers': {wanted}}})",
    )


def _layers(setup: Setup) -> list[bool]:
    """The flags of the repeated blocks."""
    blocks = [
        m for m in setup.model.modules() if any(c.__name__ == "GradientCheckpointingLayer" for c in type(m).__mro__)
    ]
    return [bool(m.gradient_checkpointing) for m in blocks]
