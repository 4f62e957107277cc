"""Randomness that no checkpoint puts back: Python's, NumPy's, generators of the model's own."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT004",
    severity="wrong",
    title="a checkpointed call draws from a generator that checkpointing does not put back",
    symptom="gradients are wrong in some steps and right in others",
    source="pytorch 2.13 utils/checkpoint.py:1634 (only the default generators are kept); gradient-checkpointing#35",
    mend="Draw before the checkpointed call and pass the number in, or draw from torch's default generator.",
)


def find(setup: StepUnderTest) -> Finding | None:
    if not setup.gradients_differ:
        return None
    for call in setup.calls:
        own = {"a torch.Generator of its own"} if any(op.has_generator for op in call.ops) else set()
        drawn = (call.moved & call.moved_again) | own
        if drawn and call.divergence is not None:
            before, _ = call.divergence
            return CHECK.found(
                f"{' and '.join(sorted(drawn))} moves in forward and again when recomputed; {before.name} at "
                f"{before.line} then gives something else, and gradients are up to {100 * setup.distance:.3g} % off",
                module=call.path,
            )
    return None
