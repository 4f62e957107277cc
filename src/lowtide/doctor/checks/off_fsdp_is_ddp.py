"""FSDP is switched on, and the model is replicated all the same."""

import os
import sys

from torch.nn.parallel import DistributedDataParallel

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.step.subclasses import wrapped_parameters
from lowtide.units import format_bytes

CHECK = Check(
    code="LT108",
    severity="waste",
    title="FSDP was asked for, and the parameters are not sharded",
    symptom="every rank holds the whole model",
    source="accelerate 1.15 state.py:983-1013 (the plugin is ignored where the backend is gloo on CPU)",
    mend="Start on devices that Accelerate shards on, or call torch.distributed.fsdp.fully_shard yourself.",
)


def find(setup: StepUnderTest) -> Finding | None:
    plugin = _plugin()
    if not plugin or setup.ddp is None:
        return None
    if wrapped_parameters(setup.model) or any("FSDP" in type(m).__name__ for m in setup.model.modules()):
        return None
    size = sum(p.nbytes for p in setup.model.parameters())
    return CHECK.found(
        f"{plugin}; the model is in DistributedDataParallel and each rank holds all {format_bytes(size)} of it",
        gain=_gain(setup, setup.ddp),
    )


def _gain(setup: StepUnderTest, ddp: DistributedDataParallel) -> str:
    """By the sizes of what is sharded: to measure it, all ranks would have to build the model anew."""
    ranks = ddp.process_group.size()
    if ranks == 1:
        return "none with one rank: there is nobody to share with"
    size = sum(p.nbytes * (2 if p.requires_grad else 1) for p in setup.model.parameters())
    return (
        f"not measured, since sharding takes all ranks at once: by their sizes {format_bytes(size - size // ranks)} of "
        f"parameters and gradients on each of {ranks} ranks, and as much of each state of the optimizer"
    )


def _plugin() -> str:
    """Which setting switches FSDP on; "" where none does."""
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("true", "1"):
        return "ACCELERATE_USE_FSDP is set"
    state = sys.modules.get("accelerate.state")
    shared = {} if state is None else state.AcceleratorState._shared_state
    return "Accelerate has an FSDP plugin" if shared.get("fsdp_plugin") is not None else ""
