"""Copies of frozen float32 weights that autocast makes each step, and autograd stores."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.kept_state import with_attribute
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.units import format_bytes

CHECK = Check(
    code="LT210",
    severity="waste",
    title="autocast copies frozen float32 weights, and autograd stores the copies",
    symptom="an adapter's step takes half the frozen model's size more",
    source="torch.amp: weights are cast for each use; peft 0.21.2 utils/other.py:190 casts the base model to float32",
    mend="Load the frozen weights in the type that autocast uses: the same numbers, without copies.",
)


def find(setup: StepUnderTest) -> Finding | None:
    copies = [s for s in setup.seen.stored.values() if s.cast_of and s.cast_of not in setup.trainable]
    if not copies:
        return None
    size = sum(s.size_bytes for s in copies)
    names = {s.cast_of for s in copies}
    weights = [p for n, p in setup.model.named_parameters() if n in names]
    kept = sum(p.nbytes for p in weights)
    return CHECK.found(
        f"{len(copies)} copies of frozen weights in {copies[0].dtype}, {format_bytes(size)}, are stored for backward; "
        f"the weights themselves take {format_bytes(kept)}",
        module=copies[0].path,
        gain=setup.gain(lambda: with_attribute("data", [(p, p.data.to(copies[0].dtype)) for p in weights])),
        fix=f"for p in model.parameters():\n    if not p.requires_grad:\n        p.data = p.data.to({copies[0].dtype})",
    )
