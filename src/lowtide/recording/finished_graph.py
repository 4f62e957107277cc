"""What is there before a step, and the step's graph when it is over: of a rehearsal, or of a real step."""

import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.device.block_size import block_bytes
from lowtide.device.memory import allocated_bytes, counts_all
from lowtide.device.names import device_name, is_accelerator
from lowtide.graph.step_graph import StepGraph
from lowtide.hollow.memory import is_hollow
from lowtide.recording.recorder import KernelFacts, Recorder
from lowtide.step.batches import batch_tensors, describe_batch
from lowtide.step.data_parallel import ddp_bucket_bytes
from lowtide.step.operators import gradient_of, storage_of
from lowtide.step.optimizer_state import (
    UnknownStateError,
    checked_optimizer,
    existing_state_bytes,
    optimizer_bytes,
    state_tensors,
)
from lowtide.step.sharding.zero3 import shards_of
from lowtide.step.subclasses import plain_tensors


@dataclass(frozen=True)
class WithoutMemory:
    """What is asked where a step runs on tensors without memory.

    Attributes:
        kernel_facts: As in ``Recorder``.
        optimizer_bytes: As the function of that name.
        started: Called with the recorder before the step runs.
        block_bytes: The allocator of the device that is planned for gives whole blocks.
    """

    kernel_facts: KernelFacts
    optimizer_bytes: Callable[[Any, list[nn.Parameter]], tuple[int, int]]
    started: Callable[[Recorder], None]
    block_bytes: int


def add_residents(recorder: Recorder, model: nn.Module, batch: Any) -> None:
    """Parameters, gradients, buffers and batch: storages that are there before the step."""
    live = recorder.live
    for p in model.parameters():
        for t in plain_tensors(p):
            if (number := live.id_of(t, "parameter")) is not None and t is p:
                recorder.parameters[number] = p
        for t in plain_tensors(grad) if (grad := gradient_of(p)) is not None else ():
            live.id_of(t, "gradient")
    for t in shards_of(model.parameters()):
        live.id_of(t, "parameter")
    recorder.functions.buffers = list(plain_tensors(*model.buffers()))
    for t in recorder.functions.buffers:
        live.id_of(t, "buffer")
    for t in plain_tensors(*batch_tensors(batch)):
        number = live.id_of(t, "input")
        storage = storage_of(t)
        if number is not None and storage is not None and not storage.resizable() and not is_hollow(t):
            recorder.builder.fix(number, "belongs to another library, which may refill it unseen")  # NumPy, mostly


def finished_graph(
    recorder: Recorder,
    model: nn.Module,
    batch: Any,
    optimizer: Any,
    received: set[str],
    hollow: WithoutMemory | None = None,
) -> StepGraph:
    """The graph of a step that is over; ``received``: names of the parameters that have, or had, a gradient."""
    device = recorder.device
    recorder.settle_writes()
    written, builder = recorder.written_parameters, recorder.builder
    block = block_bytes(device.type) if hollow is None else hollow.block_bytes
    new = builder.settle_gradients()
    recorder.note_state(state_tensors(checked_optimizer(optimizer)))
    new_bytes = sum(_in_blocks(builder.storages[number].bytes, block) for number in new)
    made = {name for name, numbers in recorder.new_gradients.items() if numbers <= new}
    trained = [p for name, p in model.named_parameters() if name in received]
    state_bytes, step_bytes = 0, 0
    unknown: dict[str, str] = {}
    try:
        state_bytes, step_bytes = (optimizer_bytes if hollow is None else hollow.optimizer_bytes)(optimizer, trained)
    except UnknownStateError as error:
        unknown = {"optimizer": str(error)}
    resident = resident_bytes(model, batch, device, received - made, existing_state_bytes(optimizer, device), block)
    if hollow is None and not counts_all(device):  # there the allocator has counted them
        # Targets, mostly: they were there before the step, and the model was not called with them.
        resident["batch"] += sum(_in_blocks(builder.storages[n].bytes, block) for n in recorder.live.take_as_inputs())
    return builder.build(
        device=device.type,
        device_name=device_name(device) if is_accelerator(device) else platform.processor() or "cpu",
        resident=resident | {"gradients": resident["gradients"] + new_bytes, "optimizer": state_bytes},
        optimizer_step_bytes=step_bytes,
        written_parameters=tuple(
            name
            for name, p in model.named_parameters()
            if any(recorder.live.find(t) in written for t in plain_tensors(p))
        ),
        provenance=unknown
        | {"torch": torch.__version__, "model": type(model).__name__, "batch": describe_batch(batch)},
    )


def resident_bytes(
    model: nn.Module,
    batch: Any,
    device: torch.device,
    with_grad: set[str],
    optimizer_bytes: int = 0,
    block: int | None = None,
) -> dict[str, int]:
    """Live bytes through the whole step by part, each storage once; of the optimizer's state only that it is known.

    Args:
        block: Bytes of the blocks that the allocator gives; None: as that of ``device``.
    """
    block = block or block_bytes(device.type)
    seen: set[int] = set()

    def total(tensors: Iterable[torch.Tensor]) -> int:
        found = {s._cdata: s for t in plain_tensors(*tensors) if (s := storage_of(t)) is not None}
        new = [s for key, s in found.items() if key not in seen and s.device == device]
        seen.update(found)
        return sum(_in_blocks(s.nbytes(), block) for s in new)

    by_part = {
        "parameters": total([*model.parameters(), *shards_of(model.parameters())]),
        "buffers": total(model.buffers()),
        "batch": total(batch_tensors(batch)),
        "gradients": sum(
            _in_blocks(t.nbytes, block) for n, p in model.named_parameters() if n in with_grad for t in plain_tensors(p)
        ),
        "other": ddp_bucket_bytes(model),
    }
    if counts_all(device):
        existing = total(grad for p in model.parameters() if (grad := gradient_of(p)) is not None)
        known = by_part["parameters"] + by_part["buffers"] + by_part["batch"] + existing + optimizer_bytes
        by_part["other"] = max(0, (allocated_bytes(device) or 0) - known)
    return by_part


def _in_blocks(size: int, block: int) -> int:
    return -(-size // block) * block
