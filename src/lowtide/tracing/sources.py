"""``trace``: a StepGraph of one step, from a rehearsal on real tensors or from hollow ones, without memory."""

import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowtide.device.out_of_memory import told_by_name
from lowtide.graph.step_graph import StepGraph
from lowtide.hollow.cuda_kernels import cuda_kernels
from lowtide.hollow.cuda_scripts import cuda_means_cpu
from lowtide.hollow.devices import TargetDevice, target_of
from lowtide.hollow.kept_workspaces import kept_workspace_bytes
from lowtide.hollow.mode import HollowMode
from lowtide.hollow.models import hollow_batch, hollow_parameters, is_config, model_of
from lowtide.hollow.workspaces import Workspaces
from lowtide.recording.finished_graph import WithoutMemory
from lowtide.recording.recorder import Recorder
from lowtide.step.backward_entry import runs_within
from lowtide.step.data_parallel import unwrapped
from lowtide.step.optimizer_state import bytes_without_memory, checked_optimizer
from lowtide.step.whole_modules import called_whole, matching
from lowtide.tracing.tracer import Step, record

_WAY_OUT = (
    "Pass a smaller batch; trace without memory (device=); or fit the model without a batch, and its steps are watched."
)


def trace(
    model: Any,
    batch: Any,
    *,
    step: Step | None = None,
    optimizer: Any = None,
    device: str | TargetDevice | None = None,
    opaque: Sequence[str] = (),
    accumulate: int | None = None,
) -> StepGraph:
    """Record one training step, forward and backward, below autograd.

    Runs the step once without holding what autograd stores, so it works where the plain step would not fit. Gradients,
    buffers, batch and random generators are afterwards as they were before.

    Args:
        model: On the device where it trains, in the mode (train or eval) it trains in. Of one in
            ``DistributedDataParallel`` the module inside is run, so nothing is communicated. With ``device`` also one
            on ``meta``, or a configuration of transformers.
        batch: One batch; a mapping is called ``model(**batch)``, a tuple or list ``model(*batch)``.
        step: ``(model, batch) -> loss``, where the loss is not the model's own output.
        optimizer: Counts the state it has or will have. An ``Optimizer``, or a name such as ``"adamw"``.
        device: Trace for this device without memory and without computing: ``"cpu"``, ``"cuda"`` or a
            ``TargetDevice``. None: on the real tensors. What depends on unknown values is listed in
            ``provenance["assumed"]``.
        accumulate: Micro-batches whose gradients add up before the optimizer steps. 1: backward makes gradients. From
            2 on: the step of a later one, which finds them there and takes most. None: as the parameters' ``.grad`` are
            now.
        opaque: Names of modules (``"*.experts"``) whose calls are one op each, run again as a whole; see ``fit``.

    Returns:
        The step's ops, storages, lifetimes and what autograd stores. What the model returned counts as held until
        backward ends, unless ``step`` lets it go.

    Raises:
        StepError: no scalar loss, no trainable parameter, or the model rejects the batch.
        UnsupportedModelError: wrapped otherwise, sharded, or on several devices.
        RehearsalMemoryError: memory ran out.
    """
    checked_optimizer(optimizer)
    if accumulate is not None and accumulate < 1:
        raise ValueError(f"accumulate={accumulate}: a step has one micro-batch or more.")
    if opaque and device is not None:
        raise ValueError("opaque= needs real tensors: a call that runs again is proven. Leave out device= or opaque=.")
    if device is None:
        module = unwrapped(model) if isinstance(model, nn.Module) else model
        with (
            called_whole(module, matching(module, opaque) if opaque else []),
            told_by_name("a step was traced", _WAY_OUT),
        ):
            return record(model, batch, step, optimizer, accumulate=accumulate)
    return trace_hollow(model, batch, target_of(device), step=step, optimizer=optimizer, accumulate=accumulate)


def trace_hollow(
    model: Any,
    batch: Any,
    target: TargetDevice,
    *,
    step: Step | None,
    optimizer: Any,
    mode: HollowMode | None = None,
    accumulate: int | None = None,
) -> StepGraph:
    """``trace`` on hollow tensors; ``mode``: one that has seen models like it knows their ops."""
    mode = mode or HollowMode(target.kernels)
    workspaces = Workspaces(mode.specs, target)
    with torch.device("cpu"):
        batch = hollow_batch(batch)

    def started(recorder: Recorder) -> None:
        builder = recorder.builder
        mode.where = lambda: builder.path if builder.recording else None

    def optimizer_bytes(optimizer: Any, parameters: list[nn.Parameter]) -> tuple[int, int]:
        return bytes_without_memory(optimizer, parameters, kernels=target.kernels, block_bytes=target.block_bytes)

    hollow = WithoutMemory(workspaces.facts, optimizer_bytes, started, target.block_bytes)
    with ExitStack() as stack:
        stack.enter_context(torch.device("cpu"))  # hollow tensors are the CPU's, whatever the default device is
        stack.enter_context(mode)
        if target.kernels == "cuda":
            stack.enter_context(_device_autocast())
            stack.enter_context(cuda_kernels(target.capability))
            stack.enter_context(runs_within(stack.enter_context(cuda_means_cpu(mode))))
        if is_config(model):
            model = model_of(model)
        stack.enter_context(hollow_parameters(model))
        mode.assumed.clear()
        try:
            graph = record(model, batch, step, optimizer, hollow=hollow, accumulate=accumulate)
        finally:
            mode.where = lambda: None
    if target.kernels == "cuda":
        graph = _on_cuda(graph, target)
    return replace(
        graph,
        device_name=target.name or (target.kernels if target.kernels != "cpu" else platform.processor() or "cpu"),
        provenance=graph.provenance | {"source": "no memory", "assumed": _assumptions(mode, workspaces)},
    )


def _device_autocast() -> AbstractContextManager[Any]:
    """Hollow tensors lie on the CPU, so its autocast stands for the device's; one around the trace is followed."""
    if not torch.is_autocast_enabled("cuda"):
        return nullcontext()
    return torch.autocast(
        "cpu", torch.get_autocast_dtype("cuda"), cache_enabled=torch.is_autocast_cache_enabled()
    )  # fmt: skip


def _on_cuda(graph: StepGraph, target: TargetDevice) -> StepGraph:
    """``graph``, whose tensors were on the CPU, as a CUDA device has it.

    It has blocks, names, generators in host memory, and libraries that keep a workspace.
    """
    kept = kept_workspace_bytes(graph, target)
    return replace(
        graph,
        device="cuda",
        storages=tuple(replace(s, bytes=target.in_blocks(s.bytes)) for s in graph.storages),
        resident=graph.resident | {"workspaces": kept},
        ops=tuple(replace(op, rng_bytes=0) for op in graph.ops),
        signatures=tuple(_named_cuda(s) for s in graph.signatures),
        calls=tuple(call.replace("autocast(cpu,", "autocast(cuda,") for call in graph.calls),
    )


def _named_cuda(described: Any) -> Any:
    """A signature with CUDA where it says CPU."""
    if isinstance(described, dict):
        return {k: "cuda" if k == "device" and v == "cpu" else _named_cuda(v) for k, v in described.items()}
    return [_named_cuda(v) for v in described] if isinstance(described, list) else described


def _assumptions(mode: HollowMode, workspaces: Workspaces) -> str:
    """A line for each thing that was taken for granted."""
    lines = [f"{what} ({count} times, first in {path})" for what, (count, path) in mode.assumed.items()]
    if mode.specs.device != "cpu":
        lines += workspaces.unknown_on_device()
    if unmeasured := workspaces.unmeasured:
        ops = ", ".join(f"{op} ({count})" for op, count in sorted(unmeasured.items()))
        lines.append(f"workspaces that were not measured count as 0: {ops}")
    return "\n".join(lines)
