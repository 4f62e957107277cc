"""Backward under autocast."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT011",
    severity="risk",
    title="autocast is on while backward runs",
    symptom="operators that backward itself calls are cast again: hooks, custom Functions, recomputed regions",
    source="torch.amp docs ('Backward passes under autocast are not recommended'); pytorch#193338",
    mend="Close the autocast block after the loss, before loss.backward().",
)


def find(setup: StepUnderTest) -> Finding | None:
    if not setup.seen.backward_autocast:
        return None
    return CHECK.found("autocast is on where this diagnosis was called, around loss.backward()")
