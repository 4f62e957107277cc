"""``trace``: a StepGraph of one step, from a rehearsal on real tensors or from hollow ones, without memory."""

import platform
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from lowtide.graph.step_graph import StepGraph
from lowtide.hollow.devices import TargetDevice, target_of
from lowtide.hollow.mode import HollowMode
from lowtide.hollow.models import hollow_batch, hollow_parameters, is_config, model_of
from lowtide.hollow.workspaces import Workspaces
from lowtide.tracing.recorder import Recorder
from lowtide.tracing.tracer import Step, record


def trace(
    model: Any,
    batch: Any,
    *,
    step: Step | None = None,
    optimizer: Any = None,
    device: str | TargetDevice | None = None,
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
            ``TargetDevice``. None: on the real tensors. What depends on values that nobody has is listed in
            ``provenance["assumed"]``.

    Returns:
        The step's ops, storages, lifetimes and what autograd stores. What the model returned counts as held until
        backward ends, unless ``step`` lets it go.

    Raises:
        StepError: no scalar loss, no trainable parameter, or the model rejects the batch.
        UnsupportedModelError: wrapped otherwise, sharded, or on several devices.
    """
    if device is None:
        return record(model, batch, step, optimizer)
    return trace_hollow(model, batch, target_of(device), step=step, optimizer=optimizer)


def trace_hollow(
    model: Any, batch: Any, target: TargetDevice, *, step: Step | None, optimizer: Any, mode: HollowMode | None = None
) -> StepGraph:
    """``trace`` on hollow tensors; ``mode``: one that has seen models like it knows their ops."""
    mode, workspaces = mode or HollowMode(target.kernels), Workspaces()
    batch = hollow_batch(batch)

    def started(recorder: Recorder) -> None:
        builder = recorder.builder
        mode.where = lambda: builder.path if builder.recording else None

    with ExitStack() as stack:
        stack.enter_context(mode)
        if is_config(model):
            model = model_of(model)
        stack.enter_context(hollow_parameters(model))
        mode.assumed.clear()
        try:
            graph = record(model, batch, step, optimizer, kernel_facts=workspaces.facts, started=started)
        finally:
            mode.where = lambda: None
    return replace(
        graph,
        device_name=target.name or platform.processor() or "cpu",
        provenance=graph.provenance | {"source": "no memory", "assumed": _assumptions(mode, workspaces)},
    )


def _assumptions(mode: HollowMode, workspaces: Workspaces) -> str:
    """A line for each thing that was taken for granted."""
    lines = [f"{what} ({count} times, first in {path})" for what, (count, path) in mode.assumed.items()]
    lines += [f"workspace of {op} taken as 0 ({count} kinds)" for op, count in sorted(workspaces.unmeasured.items())]
    return "\n".join(lines)
