"""A Trainer switches checkpointing on again when it starts, and forgets how the user had set it."""

from contextlib import nullcontext

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.layer_flags import enabled_by_train, layer_flags
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.settings.checkpointing_names import asked_in, word_in

CHECK = Check(
    code="LT104",
    severity="waste",
    title="the Trainer will overwrite the model's checkpointing settings",
    symptom="every_n_layers is lost at train(), and in TRL after each generation",
    source="transformers#26221; transformers 5.23 trainer.py:1503; trl 1.16 models/utils.py:138-154",
    mend="Say it in the Trainer's arguments instead.",
)


def find(setup: StepUnderTest) -> Finding | None:
    arguments = setup.arguments
    asked, options = asked_in(arguments)
    if not asked:
        return None
    layers = layer_flags(setup.model)
    on = sum(layers.values())
    every = options.get("every_n_layers", 1)
    after = len(range(0, len(layers), every))
    if not 0 < on < len(layers) or on == after:
        return None
    wanted = round(len(layers) / on)
    return CHECK.found(
        f"{on} of {len(layers)} layers are checkpointed now; with these arguments train() makes it {after}",
        gain=setup.gain(nullcontext, lambda: enabled_by_train(setup.model, True, options)),
        fix=f"TrainingArguments(..., {word_in(arguments)}_kwargs={{'every_n_layers': {wanted}}})",
    )
