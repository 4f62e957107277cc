"""Gradients, or state of an optimizer, of parameters that do not train."""

from lowtide.doctor.finding import Check, Finding, Gain
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.units import format_bytes

CHECK = Check(
    code="LT208",
    severity="waste",
    title="frozen parameters hold gradients",
    symptom="memory as before freezing; an optimizer that has them still moves them by momentum and weight decay",
    source="torch.nn.Module.requires_grad_ leaves .grad as it is",
    mend="Set .grad to None where requires_grad is False.",
    fix="for p in model.parameters():\n    if not p.requires_grad:\n        p.grad = None",
)


def find(setup: StepUnderTest) -> Finding | None:
    frozen = [(n, p) for n, p in setup.model.named_parameters() if not p.requires_grad and p.grad is not None]
    if not frozen:
        return None
    size = sum(p.grad.nbytes for _, p in frozen if p.grad is not None)
    return CHECK.found(
        f"{len(frozen)} frozen parameters hold {format_bytes(size)} of gradients; the first is {frozen[0][0]}",
        gain=Gain(size),
    )
