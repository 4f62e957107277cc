"""Buffers that move again when a region is recomputed: BatchNorm's statistics, counters of load."""

import torch

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT002",
    severity="wrong",
    title="buffers move twice in a step",
    symptom="BatchNorm's running statistics follow the last batches faster than momentum says; evaluation differs",
    source="pytorch#96136, pytorch#62471, Automodel#3247",
    mend="Leave modules that write buffers outside of checkpointed calls, or use lowtide.checkpoint, which runs no "
    "module twice.",
    fix="from lowtide import checkpoint  # in place of torch.utils.checkpoint.checkpoint",
)


def find(setup: StepUnderTest) -> Finding | None:
    if not setup.calls or setup.failure is not None or setup.is_compiled or setup.unsteady:
        return None
    before = {n: b.detach().cpu() for n, b in setup.model.named_buffers()}
    once, now = setup.plain.buffers, setup.as_it_is.buffers
    moved = [n for n in once if n in now and not torch.equal(once[n], now[n]) and n in before]
    moved = [n for n in moved if f"buffer {n}" not in setup.differing_again]
    if not moved:
        return None
    counted = next((n for n in moved if n.endswith("num_batches_tracked")), None)
    detail = f"{moved[0]} differs from that of the step without checkpointing"
    if counted is not None:
        start = int(before[counted])
        detail = f"{counted} counts {int(now[counted]) - start} batches, {int(once[counted]) - start} without"
    return CHECK.found(f"{len(moved)} of {len(once)} buffers: {detail}", module=moved[0].rpartition(".")[0])
