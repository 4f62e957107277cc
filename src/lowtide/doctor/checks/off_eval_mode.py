"""Checkpointing is on, and the layers are in eval mode, where models do not checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lowtide.doctor.finding import Check, Finding
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
        gain=setup.gain(lambda: _training([setup.model.get_submodule(n) for n in idle])),
    )


@contextmanager
def _training(modules: list[nn.Module]) -> Iterator[None]:
    for module in modules:
        module.training = True
    try:
        yield
    finally:
        for module in modules:
            module.training = False


def _has_flagged_inside(setup: StepUnderTest, path: str) -> bool:
    """A model's flag stands for those of its layers."""
    return any(n != path and n.startswith(f"{path}." if path else "") for n in setup.flagged)
