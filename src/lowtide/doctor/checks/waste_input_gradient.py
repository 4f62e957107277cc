"""A batch that requires a gradient, which nothing reads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest

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
    leaves = setup.batch_leaves()
    if not leaves or setup.failure is not None or any(c.reentrant for c in setup.calls):
        return None
    without, now = setup.measured_under(lambda: _off(leaves)), setup.measured
    if without.flops >= now.flops and without.peak_bytes >= now.peak_bytes:
        return None
    return CHECK.found(
        f"{len(leaves)} tensors of the batch require a gradient: {now.flops} floating-point operations a step, "
        f"{without.flops} without",
        gain=setup.gain(lambda: _off(leaves)),
    )


@contextmanager
def _off(leaves: list[torch.Tensor]) -> Iterator[None]:
    for leaf in leaves:
        leaf.requires_grad_(False)
    try:
        yield
    finally:
        for leaf in leaves:
            leaf.requires_grad_()
