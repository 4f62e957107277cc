"""DDP searches for unused parameters where all are used."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.setup import Setup

CHECK = Check(
    code="LT211",
    severity="waste",
    title="DDP searches for unused parameters, and there are none",
    symptom="each step walks the whole graph before backward, and reduces in an extra round",
    source="pytorch DDP docs; transformers 5.23 trainer.py:754 (on whenever checkpointing is off)",
    mend="Set find_unused_parameters=False.",
    fix="DistributedDataParallel(..., find_unused_parameters=False)  # Trainer: ddp_find_unused_parameters=False",
)


def look(setup: Setup) -> Finding | None:
    if setup.ddp is None or not setup.ddp.find_unused_parameters or setup.failure is not None:
        return None
    if any(g is None for g in setup.as_it_is.gradients.values()):
        return None
    model, device = setup.model, setup.device
    gain = setup.gain(lambda: _alone(model, device, searching=False), lambda: _alone(model, device, searching=True))
    return CHECK.found(
        f"all {len(setup.trainable)} trainable parameters got a gradient in this step",
        gain=replace(gain, note="the extra round between ranks comes on top"),
    )


@contextmanager
def _alone(model: nn.Module, device: torch.device, *, searching: bool) -> Iterator[nn.Module]:
    """The model in a DDP of this rank alone. Others may not be here: their batch may leave parameters unused."""
    group = _group_of_one(device.type)
    yield DistributedDataParallel(model, process_group=group, find_unused_parameters=searching, init_sync=False)


@functools.cache  # Kept: a reducer that drops the last reference to a group waits, with the GIL, for its threads.
def _group_of_one(device_type: str) -> dist.ProcessGroup:
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    backend, kind = dist.ProcessGroupGloo(dist.HashStore(), 0, 1), dist.ProcessGroup.BackendType.GLOO
    for name in {"cpu", device_type}:
        group._register_backend(torch.device(name), kind, backend)
    group._set_default_backend(kind)
    return group
