"""A reentrant checkpoint whose function reads tensors that are not its arguments."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT007",
    severity="wrong",
    title="a reentrant checkpoint reads tensors that are not its arguments: their gradients are lost or doubled",
    symptom="the same loss, wrong gradients: K/V shared between layers (Gemma-3n, Gemma-4), closures",
    source="unsloth-zoo#813, unsloth-zoo#1275, Automodel#1705, Automodel#3677",
    mend="Use use_reentrant=False, or pass every tensor as a positional argument.",
    fix='gradient_checkpointing_kwargs={"use_reentrant": False}',
)


def find(setup: StepUnderTest) -> Finding | None:
    guilty = [c for c in setup.calls if c.reentrant and c.captured]
    second_time = setup.failure is not None and "a second time" in str(setup.failure)
    if not guilty or not (setup.gradients_differ or second_time):
        return None
    what = "backward through them fails the second time"
    if not second_time:
        what = f"gradients are up to {100 * setup.distance:.3g} % off"
    return CHECK.found(
        f"{len(guilty)} reentrant checkpoints bring along {sum(c.captured for c in guilty)} tensors of this step "
        f"beside their arguments ({guilty[0].line}); {what}",
        module=guilty[0].path,
    )
