"""``preserve_rng_state=False`` around dropout."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT003",
    severity="wrong",
    title="random numbers are drawn anew when recomputed (preserve_rng_state=False)",
    symptom="gradients belong to another dropout mask than the loss; the loss falls more slowly",
    source="OLMo-core#828; accelerate 1.15 fsdp_utils.py:722 (always False under FSDP2)",
    mend="Pass preserve_rng_state=True, or set every dropout to 0.",
    fix="checkpoint(..., preserve_rng_state=True)",
)


def find(setup: StepUnderTest) -> Finding | None:
    if not setup.gradients_differ:
        return None
    guilty = [c for c in setup.calls if not c.preserve_rng_state and c.draws and c.divergence is not None]
    if not guilty:
        return None
    op = next(op for op in guilty[0].ops if op.is_random)
    return CHECK.found(
        f"{len(guilty)} of {len(setup.calls)} checkpointed calls draw random numbers ({op.name} at {op.line}) and do "
        f"not draw them again; gradients are up to {100 * setup.distance:.3g} % off",
        module=guilty[0].path,
    )
