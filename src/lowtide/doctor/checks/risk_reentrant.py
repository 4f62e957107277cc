"""Checkpoints that are reentrant without a setting that says so."""

import functools

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT304",
    severity="info",
    title="checkpoints are reentrant, because nothing was said",
    symptom="no check of what is recomputed, no keyword arguments, trouble with frozen inputs and DDP",
    source="peft 0.21.2 utils/other.py:254 (prepare_model_for_kbit_training); TorchFix TOR003",
    mend="Say use_reentrant=False.",
    fix='model.gradient_checkpointing_enable({"use_reentrant": False})',
)


def find(setup: StepUnderTest) -> Finding | None:
    functions = [vars(m).get("_gradient_checkpointing_func") for m in setup.model.modules()]
    unsaid = [
        f for f in functions if f is not None and "use_reentrant" not in (
            f.keywords if isinstance(f, functools.partial) else {}
        )
    ]  # fmt: skip
    reentrant = [c for c in setup.calls if c.reentrant]
    if not unsaid or not reentrant:
        return None
    return CHECK.found(f"{len(reentrant)} checkpoints are reentrant, and no setting asks for it")
