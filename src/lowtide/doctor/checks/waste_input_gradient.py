"""A batch that requires a gradient, which nothing reads."""

from contextlib import AbstractContextManager

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.kept_state import with_attribute
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.step.batches import batch_tensors

CHECK = Check(
    code="LT213",
    severity="waste",
    title="the batch requires a gradient",
    symptom="backward runs down to the data; frozen layers at the bottom are stored",
    source="transformers#23170 (a workaround for reentrant checkpointing that stays)",
    mend="Leave requires_grad off for data; checkpoint with use_reentrant=False.",
    fix="batch.requires_grad_(False)",
)


def find(setup: StepUnderTest) -> Finding | None:
    leaves = [t for t in batch_tensors(setup.batch) if t.is_leaf and t.requires_grad]
    if not leaves or setup.failure is not None or any(c.reentrant for c in setup.calls):
        return None

    def off() -> AbstractContextManager[None]:
        return with_attribute("requires_grad", [(leaf, False) for leaf in leaves])

    without, now = setup.measured_under(off), setup.measured
    if without.flops >= now.flops and without.peak_bytes >= now.peak_bytes:
        return None
    return CHECK.found(
        f"{len(leaves)} tensors of the batch require a gradient: {now.flops} floating-point operations a step, "
        f"{without.flops} without",
        gain=setup.gain(off),
    )
