"""Names of modules that a checkpoint wrapper has changed."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT307",
    severity="info",
    title="checkpoint wrappers stand in the names of modules",
    symptom="patterns for adapters, quantisation or sharding find nothing",
    source="torchtune#1077",
    mend="Apply adapters and patterns before the wrapper, or match names without _checkpoint_wrapped_module.",
)
_PREFIX = "_checkpoint_wrapped_module"


def find(setup: StepUnderTest) -> Finding | None:
    inside = [n for n, _ in setup.model.named_modules() if _PREFIX in n]
    if not inside:
        return None
    return CHECK.found(f"{len(inside)} modules have {_PREFIX} in their name, such as {inside[0]}", module=inside[0])
