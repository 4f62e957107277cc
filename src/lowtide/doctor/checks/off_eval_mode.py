"""Checkpointing is on, and the layers are in eval mode, where models do not checkpoint."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.kept_state import with_attribute
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.units import format_bytes

CHECK = Check(
    code="LT101",
    severity="waste",
    title="checkpointing is reported on, and does nothing: the layers are in eval mode",
    symptom="memory as without checkpointing, though is_gradient_checkpointing is True",
    source="diffusers#9850; transformers 5.23 modeling_layers.py (gate is self.training)",
    mend="Call model.train() before the step; keep dropout off by its rates, not by eval().",
    fix="model.train()",
)


def find(setup: StepUnderTest) -> Finding | None:
    idle = [
        n for n in setup.flagged
        if not setup.model.get_submodule(n).training and setup.seen.called[n] and not _has_flagged_inside(setup, n)
    ]  # fmt: skip
    if not idle or any(c.path in idle for c in setup.calls):
        return None
    stored = sum(s.size_bytes for s in setup.seen.stored.values())
    return CHECK.found(
        f"{len(idle)} modules have their flag on and run in eval mode, with gradients; the step stores "
        f"{format_bytes(stored)} for backward, and no call was checkpointed",
        module=idle[0],
        gain=setup.gain(lambda: with_attribute("training", [(setup.model.get_submodule(n), True) for n in idle])),
    )


def _has_flagged_inside(setup: StepUnderTest, path: str) -> bool:
    """A model's flag stands for those of its layers."""
    return any(n != path and n.startswith(f"{path}." if path else "") for n in setup.flagged)
