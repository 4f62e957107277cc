"""DDP searches for unused parameters where all are used."""

from lowtide.doctor.finding import Check, Finding, Gain
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT211",
    severity="waste",
    title="DDP searches for unused parameters, and there are none",
    symptom="each step walks the whole graph before backward, and reduces in an extra round",
    source="pytorch DDP docs; transformers 5.23 trainer.py:754 (on whenever checkpointing is off)",
    mend="Set find_unused_parameters=False.",
    fix="DistributedDataParallel(..., find_unused_parameters=False)  # Trainer: ddp_find_unused_parameters=False",
)


def find(setup: StepUnderTest) -> Finding | None:
    if setup.ddp is None or not setup.ddp.find_unused_parameters or setup.failure is not None:
        return None
    if any(g is None for g in setup.as_it_is.gradients.values()):
        return None
    return CHECK.found(
        f"all {len(setup.trainable)} trainable parameters got a gradient in this step",
        gain=Gain(why_not="all ranks would have to build another DDP at once. Time a step with it off"),
    )
