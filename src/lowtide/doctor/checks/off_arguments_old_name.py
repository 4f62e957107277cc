"""Settings under a deprecated name that differ from the ones that are read."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.setup import Setup

CHECK = Check(
    code="LT105",
    severity="waste",
    title="checkpointing settings under the old name, which nobody reads any more",
    symptom="use_reentrant or every_n_layers has no effect; TRL's forced use_reentrant=True never arrives",
    source="transformers 5.23 training_args.py:1533, trainer.py:1507; trl 1.16 sft_trainer.py:895",
    mend="Set activation_checkpointing and activation_checkpointing_kwargs, before the arguments are made.",
)


def look(setup: Setup) -> Finding | None:
    arguments = setup.arguments
    if arguments is None or not hasattr(arguments, "activation_checkpointing_kwargs"):
        return None
    pairs = [("gradient_checkpointing", "activation_checkpointing")]
    pairs += [(f"{old}_kwargs", f"{new}_kwargs") for old, new in pairs]
    for old, new in pairs:
        told, read = getattr(arguments, old, None), getattr(arguments, new)
        if told != read and told is not None:
            return CHECK.found(f"{old}={told!r} was set; the Trainer reads {new}={read!r}", fix=f"{new}={told!r}")
    return None
