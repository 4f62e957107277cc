"""``record``: one training step as a StepGraph.

Runs the step once on the real tensors without holding what autograd stores (see ``recorder``), so it works where the
plain step would not fit. Gradients, buffers, batch and random generators are afterwards as they were before.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide.device.autocast import outside_autocast
from lowtide.errors import LowtideError, StepError
from lowtide.graph.gradients import with_gradients_before, with_gradients_made
from lowtide.graph.step_graph import StepGraph
from lowtide.recording.finished_graph import WithoutMemory, add_residents, finished_graph
from lowtide.recording.gradient_sums import fold
from lowtide.recording.recorder import Recorder
from lowtide.step import module_calls
from lowtide.step.backward_entry import observed_by
from lowtide.step.batches import batch_tensors, call_model, describe_batch, without_history
from lowtide.step.data_parallel import gradients_are_buckets, unwrapped
from lowtide.step.operators import gradient_of, is_wrapper_type
from lowtide.step.restore import preserve_training_state, set_aside_other_gradients
from lowtide.step.sharding.units import gather_each_once
from lowtide.step.subclasses import plain_tensors
from lowtide.tracing.model_facts import ModelFacts

Step = Callable[[nn.Module, Any], torch.Tensor]
_MOST_RECORDS = 2  # TorchScript runs other code from the second call on


def default_loss(output: Any) -> torch.Tensor:
    """The output's ``.loss``, else the mean of squares of its first floating-point tensor."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if isinstance(loss, torch.Tensor):
        return loss
    for tensor in batch_tensors(output):
        if tensor.is_floating_point() and tensor.requires_grad:
            return tensor.float().square().mean()
    raise StepError(
        f"the model returned no floating-point tensor that requires a gradient (it returned {type(output).__name__}).\n"
        "Pass step=lambda model, batch: ... that returns the scalar loss."
    )


def run_step(model: nn.Module, batch: Any, step: Step | None) -> tuple[torch.Tensor, Any]:
    """The loss, and what the caller of a bare model would still hold while backward runs.

    Raises:
        StepError: the model rejects the batch, or what comes back is no scalar that requires a gradient.
    """
    torch.clear_autocast_cache()  # casts of an earlier step in the same autocast region would not be made again
    try:
        output = None if step is not None else call_model(model, batch)
        loss = step(model, batch) if step is not None else default_loss(output)
    except (LowtideError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise StepError(
            f"the step failed on this batch: {type(error).__name__}: {error}\n  batch  {describe_batch(batch)}\n"
            "Make the step run without lowtide first; the traceback above is the model's own."
        ) from error
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(type(loss).__name__)
        raise StepError(f"the step returned {got}, not a scalar loss.\nReturn one number that backward can start from.")
    if not loss.requires_grad:
        raise StepError(
            "the step's loss requires no gradient: nothing would be trained.\n"
            "Leave no_grad, and train at least one parameter that the loss depends on."
        )
    set_aside_other_gradients(loss)
    return loss, output


def record(
    model: nn.Module,
    batch: Any,
    step: Step | None,
    optimizer: Any,
    *,
    forward: Callable[[Callable[[], Any]], Any] = lambda run: run(),
    hollow: WithoutMemory | None = None,
    accumulate: int | None = None,
) -> StepGraph:
    """``trace``, with ``forward`` around the forward pass: ranks may tell each other how it went.

    Args:
        hollow: Of a step without memory.
        accumulate: See ``trace``.
    """
    model, batch = unwrapped(model), without_history(batch)
    facts = ModelFacts(model)
    facts.check_supported()
    kernel_facts = None if hollow is None else hollow.kernel_facts
    gather_each_once(model)
    with_gradient = {name for name, p in model.named_parameters() if gradient_of(p) is not None}
    there = facts.is_wrapped or gradients_are_buckets(model)
    # Beside the gradients that are there, as many again would break a budget. The recorder writes none of them.
    for _ in range(_MOST_RECORDS):
        recorder = Recorder(facts.device, region="model" if step is None else "step", kernel_facts=kernel_facts)
        if hollow is not None:
            hollow.started(recorder)
        with preserve_training_state(model, batch, gradients="zeroed" if there else "kept"):
            received = _record_step(recorder, model, batch, step, forward)
        if hollow is not None or not recorder.functions.found_unsettled:
            break
    if recorder.profiled:
        raise LowtideError(
            "a profiler is active on this thread: what kernels take beside what they make cannot be measured.\n"
            "Trace the step, or fit a batch, outside of it. lowtide.fit(model) without a batch waits for such a step."
        )
    received |= with_gradient
    graph = finished_graph(recorder, model, batch, optimizer, received, hollow)
    graph = fold(graph, recorder.sums.targets)
    if accumulate is None:
        return graph
    return with_gradients_made(graph) if accumulate == 1 else with_gradients_before(graph)


def _record_step(
    recorder: Recorder, model: nn.Module, batch: Any, step: Step | None, forward: Callable[[Callable[[], Any]], Any]
) -> set[str]:
    """Run the step under ``recorder``; the names of the parameters that received a gradient."""
    builder = recorder.builder
    received: set[str] = set()
    undo = module_calls.install(model, _root_call(model, recorder))
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p, name=name: received.add(name))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]

    def run() -> tuple[torch.Tensor, Any]:
        with builder.resumed():
            return run_step(model, batch, step)

    try:
        add_residents(recorder, model, batch)
        recorder.observe_sharding(model)
        with module_calls.thread_state.observed_by(recorder), torch.enable_grad(), recorder:
            with (
                observed_by(recorder),
                torch.autograd.graph.saved_tensors_hooks(recorder.hooks.pack, recorder.hooks.unpack),
            ):
                with builder.paused():
                    loss, output = forward(run)
            if received:
                raise StepError(
                    "the step called backward itself.\nReturn the loss and leave its backward to the caller."
                )
            with outside_autocast():
                recorder.start_backward()
                loss.backward()
        builder.recording = False
        recorder.note_gradients(model)
        del loss, output
    finally:
        # An error in backward must not skip this: the nodes hold the graph, which holds the model.
        recorder.stop()
        undo()
        for hook in hooks:
            hook.remove()
        gc.collect()
    return received


def _root_call(model: nn.Module, recorder: Recorder) -> Callable[..., Any]:
    """The model's own call while tracing: a module call that also notes what it was called with."""
    call = module_calls.compiled_call_of(model) or model._call_impl
    builder, live = recorder.builder, recorder.live

    def root(*args: Any, **kwargs: Any) -> Any:
        if module_calls.thread_state.observer is not recorder:
            return call(*args, **kwargs)
        if builder.frame == 0:
            builder.calls.append(module_calls.call_signature(model, args, kwargs))
        builder.enter("" if torch.is_grad_enabled() else module_calls.NO_GRAD)
        try:
            output = call(*args, **kwargs)
        finally:
            builder.leave()
        # Outside, a wrapper may be written in place, which its parts do not count: no replay may read them.
        for part in plain_tensors(*(t for t in batch_tensors(output) if is_wrapper_type(type(t)))):
            if (number := live.id_of(part)) is not None:
                builder.mark_written(number)
        return output

    vars(root)["lowtide"] = True  # as ``is_lowtide_call`` knows it
    return root
