"""What a device needs for a step: beside tensors, for fragments, and whether that fits.

    low        what tensors take, and the least that a context takes
    expected   and the context, the libraries' workspace, buffers of communication, a little fragmentation
    high       and much fragmentation: the allocator's blocks are not filled

"fits" means that the high amount does, "does not fit" that the low one does not. The shares below are assumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowtide.estimation.device_table import Device
from lowtide.estimation.op_classes import class_of
from lowtide.foresight.training_setup import TrainingSetup
from lowtide.graph.step_graph import StepGraph

FITS, UNCERTAIN, DOES_NOT_FIT = "fits", "uncertain", "does not fit"
FRAGMENTATION = (0.0, 0.03, 0.10)  # of what a step makes
_CONTEXT = (0.7, 1.0, 1.3)
# Handles of the BLAS library that have a workspace: forward's thread has one, autograd's has one. Measured on an A100:
# benchmarks of a head and its loss (``docs/published.md``) are the allocator's to the byte with two.
BLAS_HANDLES = 2
_WORKSPACE = (1, BLAS_HANDLES, 3)
COMMUNICATION_BYTES = 1 << 29  # of one group of ranks
_COMMUNICATION = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Amount:
    low: float
    expected: float
    high: float


def groups(setup: TrainingSetup) -> int:
    """Of ranks that communicate."""
    return sum(
        n > 1 for n in (setup.data_parallel, setup.tensor_parallel, setup.expert_parallel, setup.pipeline_parallel)
    )


def beside(setup: TrainingSetup, level: int) -> float:
    """Beside tensors: context, workspace, buffers of communication."""
    device = setup.device
    return (
        _CONTEXT[level] * setup.context_bytes
        + _WORKSPACE[level] * device.blas_workspace_bytes
        + _COMMUNICATION[level] * groups(setup) * COMMUNICATION_BYTES
    )


def workspaces_bytes(device: Device, graph: StepGraph) -> int:
    """Of the BLAS library, for the threads that multiply matrices in ``graph``."""
    threads = {op.backward for op in graph.ops if class_of(op.name) == "matmul"}
    return min(len(threads), BLAS_HANDLES) * device.blas_workspace_bytes


def amounts(setup: TrainingSetup, allocated: int, resident: int) -> Amount:
    """The device's peak where the step allocates ``allocated`` bytes at most, ``resident`` of them throughout."""
    low, expected, high = (
        math.ceil(allocated + beside(setup, i) + FRAGMENTATION[i] * (allocated - resident)) for i in range(3)
    )
    return Amount(low, expected, high)


def most_allocated(setup: TrainingSetup, resident: int) -> int:
    """Allocated bytes of a step whose high amount just fits."""
    room = setup.device.usable_bytes - beside(setup, 2) + FRAGMENTATION[2] * resident
    return int(room / (1 + FRAGMENTATION[2])) - 1


def verdict_of(peak: Amount, device: Device) -> str:
    if peak.high <= device.usable_bytes:
        return FITS
    return UNCERTAIN if peak.low <= device.usable_bytes else DOES_NOT_FIT
