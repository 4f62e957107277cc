"""Restores everything that a step of training may move, whatever happens in it."""

import random
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy
import torch
from torch import nn

from lowtide.device.generators import GeneratorStates
from lowtide.errors import UnsupportedModelError
from lowtide.step.autograd_leaves import leaves_of
from lowtide.step.batches import batch_tensors
from lowtide.step.bits import same_bits
from lowtide.step.data_parallel import preserve_ddp_state
from lowtide.step.deepspeed_engines import is_partitioned
from lowtide.step.operators import gradient_of, storage_of
from lowtide.step.sharding.units import preserve_fsdp_state
from lowtide.step.subclasses import plain_tensors, wrapped_parameters

Gradients = Literal["zeroed", "kept", "none", "discarded"]


class _Rehearsals(threading.local):
    """Those that are open on a thread, the innermost last."""

    def __init__(self) -> None:
        self.others: list[_OtherGradients] = []


_rehearsals = _Rehearsals()


class _OtherGradients:
    """Gradients of leaves that are neither the model's nor the batch's (a discriminator's): set aside meanwhile."""

    def __init__(self, model: nn.Module, known: Iterable[torch.Tensor]) -> None:
        self._known = set(map(id, known))
        self._memory = {p.data_ptr() for p in model.parameters()}  # a rehearsal under DDP runs on aliases
        self._sharded = bool(wrapped_parameters(model))  # whose leaves are made in the step
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None, Any]] = []

    def set_aside(self, loss: torch.Tensor) -> None:
        for leaf in () if self._sharded else leaves_of([loss]):
            if id(leaf) not in self._known and leaf.data_ptr() not in self._memory:
                self._known.add(id(leaf))
                self._gradients.append((leaf, leaf.grad, leaf._post_accumulate_grad_hooks))
                leaf.grad = None
                if leaf._post_accumulate_grad_hooks is not None:
                    leaf._post_accumulate_grad_hooks = OrderedDict()

    def restore(self) -> None:
        for leaf, gradient, hooks in self._gradients:
            leaf.grad, leaf._post_accumulate_grad_hooks = gradient, hooks


def set_aside_other_gradients(loss: torch.Tensor) -> None:
    """Backward from ``loss`` in a rehearsal: leaves that it does not know get back the gradients that they have now."""
    if _rehearsals.others:
        _rehearsals.others[-1].set_aside(loss)


class TrainingState:
    """What a step may move besides gradients, as it is now: random generators, buffers, where parameters lie.

    Args:
        others: Tensors whose contents are copied as those of the buffers are.
        unwritten: Ids of tensors that need no copy.
    """

    def __init__(self, model: nn.Module, others: Iterable[torch.Tensor] = (), unwritten: Collection[int] = ()) -> None:
        parameters = list(model.parameters())
        self._generators = GeneratorStates(parameters)
        self._python, self._numpy = random.getstate(), numpy.random.get_state()
        # A step may give a parameter other memory (``p.data = ...``).
        self._homes = [(p, p.data) for p in parameters if storage_of(p) is not None]
        # It may also assign another tensor to a buffer.
        self._bound = [(m._buffers, dict(m._buffers)) for m in model.modules() if m._buffers]
        moved = plain_tensors(*model.buffers(), *others)
        tensors = [t for t in moved if id(t) not in unwritten and storage_of(t) is not None]
        with torch.no_grad():
            self._contents = [(t, t.detach().clone()) for t in tensors]

    def restore(self) -> None:
        """Put all of it back, bitwise. May be called again."""
        for p, home in self._homes:
            if p.data_ptr() != home.data_ptr():
                p.data = home
        for buffers, names in self._bound:
            if any(buffers.get(n) is not b for n, b in names.items()):
                buffers.update(names)
        with torch.no_grad():
            for tensor, old in self._contents:
                if not same_bits(tensor, old):  # writing only what moved keeps version counters still
                    tensor.copy_(old)
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        self._generators.restore()


def check_can_be_rehearsed(model: nn.Module) -> None:
    """Raises: UnsupportedModelError: only real steps of ``model`` can be run."""
    if is_partitioned(model.parameters()):
        raise UnsupportedModelError(
            "the model is partitioned by DeepSpeed's ZeRO-3: a rehearsal would count as a step of its engine.\n"
            "Call lowtide.fit without a batch: it plans from real steps."
        )
    if made := next((name for name, p in model.named_parameters() if not p.is_leaf), None):
        raise UnsupportedModelError(
            f"parameter {made} is a result of ops, as in an inner training step: a rehearsal would go through its "
            "graph.\nCall lowtide.fit without a batch: it plans from real steps."
        )


@contextmanager
def preserve_training_state(
    model: nn.Module,
    batch: Any,
    *,
    gradients: Gradients = "zeroed",
    written_parameters: Collection[str] = (),
    unwritten: Collection[int] = (),
) -> Iterator[None]:
    """Run a step inside; gradients, buffers, batch and random generators are afterwards as they were before.

    Gradients of other models that the step's loss reaches too; their buffers not.

    Inside, post-accumulate hooks are off: an optimizer fused into backward must not step.

    Args:
        gradients: What trainable parameters have inside. ``"zeroed"``: one of their own, as in a later micro-batch.
            ``"kept"``: those that they have, which the caller protects from the step's writes. ``"none"``: none yet.
            ``"discarded"``: none, ever.
        written_parameters: Names of the parameters that the step itself writes, as a trace found them.
        unwritten: Ids of buffers and tensors of the batch that a trace has shown not to be written: not copied.

    Raises:
        UnsupportedModelError: only real steps of the model can be run.
    """
    check_can_be_rehearsed(model)
    with preserve_ddp_state(model), preserve_fsdp_state(model):
        parameters = list(model.parameters())
        hooks = [p._post_accumulate_grad_hooks for p in parameters]
        leaves = [t for t in batch_tensors(batch) if t.is_leaf and t.requires_grad]
        grads = [(t, gradient_of(t)) for t in (*parameters, *leaves)]
        written = (p for n, p in model.named_parameters() if n in written_parameters)
        before = TrainingState(model, (*batch_tensors(batch), *written), unwritten)
        anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        others = _OtherGradients(model, (*parameters, *leaves))
        _rehearsals.others.append(others)
        torch.autograd.set_detect_anomaly(False)  # the tracer's blank tensors may give NaN gradients
        try:
            for leaf in leaves:
                leaf.grad = None
            for p in parameters:
                if p.requires_grad and gradients == "discarded":
                    p._post_accumulate_grad_hooks = OrderedDict({0: _discard_gradient})
                elif p._post_accumulate_grad_hooks is not None:  # None would leave those in force that autograd has
                    p._post_accumulate_grad_hooks = OrderedDict()
                if p.requires_grad and gradients == "zeroed":
                    p.grad = torch.zeros_like(p)
                elif not (p.requires_grad and gradients == "kept"):
                    p.grad = None
            yield
        finally:
            torch.autograd.set_detect_anomaly(*anomaly)
            _rehearsals.others.pop().restore()
            for p, hook in zip(parameters, hooks, strict=True):
                if hook is None and p._post_accumulate_grad_hooks is not None:
                    p._post_accumulate_grad_hooks = OrderedDict()  # takes ours away, which None leaves in force
                p._post_accumulate_grad_hooks = hook
            torch.clear_autocast_cache()  # its casts are of this rehearsal's graph
            before.restore()
            for t, grad in grads:
                t.grad = grad


def _discard_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def versions(model: nn.Module, batch: Any) -> dict[int, int]:
    """Version of each buffer and tensor of the batch, by id. One that a rehearsal wrote has another afterwards: its own
    writes count, and so does putting back what they, or writes behind PyTorch's back, have changed."""
    tensors = plain_tensors(*model.buffers(), *batch_tensors(batch))
    return {id(t): t._version for t in tensors if not t.is_inference() and storage_of(t) is not None}
