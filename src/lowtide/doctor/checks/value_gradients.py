"""The value proof: gradients of the step as it is set up against those without checkpointing."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.outcome import distance
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.doctor.value_proof import prove

CHECK = Check(
    code="LT001",
    severity="wrong",
    title="checkpointing changes the gradients",
    symptom="training goes on with a finite loss, and learns something else",
    source="pytorch#188906 (torch compares shapes and types of what it recomputes, no values)",
    mend="Train without checkpointing until the cause is found: see the other findings, and the divergence named here. "
    "lowtide.fit(model, budget=...) runs no Python twice.",
)


def find(setup: StepUnderTest) -> Finding | None:
    if not setup.calls:
        return None
    proof = prove(setup)
    if proof.why_not and setup.failure is None:
        setup.notes.append(f"{CHECK.code}: {proof.why_not}")
    if proof.why_not or not (setup.gradients_differ or proof.missing):
        return None
    far = "have none" if proof.missing else f"are up to {100 * proof.distance:.3g} % off (worst: {proof.worst})"
    number = len(proof.missing) or sum(
        distance(g, setup.as_it_is.gradients[n]) > setup.rounding for n, g in setup.plain.gradients.items()
    )
    where = f"; first divergence: {proof.divergence}" if proof.divergence else ""
    return CHECK.found(
        f"{number} of {len(setup.trainable)} gradients {far}, against the same step with plain calls{where}",
        module=proof.divergence.call.path if proof.divergence else "",
    )
