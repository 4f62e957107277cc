"""Checkpointing that lowers no peak, and costs time."""

from lowtide.doctor import checkpoint_seam
from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.units import format_bytes

CHECK = Check(
    code="LT201",
    severity="waste",
    title="checkpointing lowers the peak by nothing, and costs time",
    symptom="memory does not fall",
    source="pytorch#147449, transformers#19340, peft#1142, verl#26",
    mend="Switch checkpointing off here.",
    fix="model.gradient_checkpointing_disable()",
)
_FEW = 0.02


def find(setup: StepUnderTest) -> Finding | None:
    if not setup.calls or setup.failure is not None or not setup.plain_fits:
        return None
    now, plain = setup.measured, setup.measured_plain
    if now.peak_bytes < (1 - _FEW) * plain.peak_bytes or now.flops <= plain.flops:
        return None
    more = now.flops / plain.flops - 1
    return CHECK.found(
        f"peak of the step {format_bytes(now.peak_bytes)} with {len(setup.calls)} checkpointed calls, "
        f"{format_bytes(plain.peak_bytes)} without, for {100 * more:.0f} % more floating-point operations",
        gain=setup.gain(checkpoint_seam.plain_calls),
    )
