"""Settings under a deprecated name that differ from the ones that are read."""

from typing import Any

from lowtide.doctor.finding import Check, Finding, Gain
from lowtide.doctor.layer_flags import enabled_by_train
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.settings.checkpointing_names import NEW, OLD, can_enable, word_in

CHECK = Check(
    code="LT105",
    severity="waste",
    title="checkpointing settings under the old name, which nobody reads any more",
    symptom="use_reentrant or every_n_layers has no effect; TRL's forced use_reentrant=True never arrives",
    source="transformers 5.23 training_args.py:1533, trainer.py:1507; trl 1.16 sft_trainer.py:895",
    mend="Set activation_checkpointing and activation_checkpointing_kwargs, before the arguments are made.",
)
_NAMES = {OLD: NEW, f"{OLD}_kwargs": f"{NEW}_kwargs"}


def find(setup: StepUnderTest) -> Finding | None:
    arguments = setup.arguments
    if arguments is None or word_in(arguments) == OLD:  # there it is the only name
        return None
    for old, new in _NAMES.items():
        told, read = getattr(arguments, old, None), getattr(arguments, new)
        if told != read and told is not None:
            return CHECK.found(
                f"{old}={told!r} was set; the Trainer reads {new}={read!r}",
                gain=_gain(setup, {new: told}),
                fix=f"{new}={told!r}",
            )
    return None


def _gain(setup: StepUnderTest, told: dict[str, Any]) -> Gain:
    """Of a step as train() would set it up with the old name's value, over one with what it reads."""
    if not can_enable(setup.model):
        return Gain(why_not=f"{type(setup.model).__name__} has no {NEW}_enable")
    read = {new: getattr(setup.arguments, new) for new in _NAMES.values()}
    return setup.gain(
        lambda: enabled_by_train(setup.model, *(read | told).values()),
        lambda: enabled_by_train(setup.model, *read.values()),
    )
