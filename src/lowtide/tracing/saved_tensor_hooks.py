"""Saved-tensor hooks that hold a description in place of what autograd stores, while a step is recorded."""

from collections.abc import Callable
from typing import Any

import torch

from lowtide.graph.step_graph import DROP, UNPACK
from lowtide.tracing import subclasses
from lowtide.tracing.compiled_regions import CompiledRegions
from lowtide.tracing.data_assignment import DataAssignmentGuard
from lowtide.tracing.fsdp.recording import FsdpRecording
from lowtide.tracing.graph_builder import GraphBuilder
from lowtide.tracing.live_storages import LiveStorages
from lowtide.tracing.module_calls import never_compiled
from lowtide.tracing.operators import is_wrapper_type

_SMALL_BYTES = 1024


class SavedPlaceholder:
    """What autograd holds in place of a tensor that the step made."""

    __slots__ = ("copy", "device", "dtype", "elements", "on_release", "saved", "size", "stride")

    def __init__(self, tensor: torch.Tensor, saved: int, on_release: Callable[[int], None], *, exact: bool) -> None:
        self.saved, self.on_release = saved, on_release
        self.copy = tensor.detach().clone() if exact else None
        self.size, self.stride, self.dtype, self.device = tensor.size(), tensor.stride(), tensor.dtype, tensor.device
        self.elements = 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True) if n)

    def unpack(self) -> torch.Tensor:
        if self.copy is not None:
            # A clone, because the copy lives longer than what backward holds, whose end is an event.
            return self.copy.clone()
        return torch.zeros(self.elements, dtype=self.dtype, device=self.device).as_strided(self.size, self.stride)

    @never_compiled
    def __del__(self) -> None:
        self.on_release(self.saved)


class HeldTensor:
    """A tensor that was there before the step: holding it costs nothing."""

    __slots__ = ("on_release", "saved", "tensor")

    def __init__(self, tensor: torch.Tensor, saved: int, on_release: Callable[[int], None]) -> None:
        self.tensor, self.saved, self.on_release = tensor, saved, on_release

    @never_compiled
    def __del__(self) -> None:
        self.on_release(self.saved)


class SavedTensorHooks:
    """``pack`` and ``unpack`` for ``torch.autograd.graph.saved_tensors_hooks``."""

    def __init__(
        self, builder: GraphBuilder, live: LiveStorages, compiled: CompiledRegions, assignments: DataAssignmentGuard
    ) -> None:
        self._builder, self._live, self._compiled, self._assignments = builder, live, compiled, assignments
        self.fsdp: FsdpRecording | None = None

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd stores ``tensor``; outside the tape's region the plan must leave it alone."""
        builder = self._builder
        if not builder.recording:
            return tensor.detach()
        if is_wrapper_type(type(tensor)):
            return subclasses.PackedWrapper(tensor, self.pack)
        compiled = self._compiled.current
        number = self._live.id_of(tensor) if compiled is None else compiled.id_of(tensor)
        if number is None:
            return tensor.detach()
        saved = builder.add_saved(number)
        self._assignments.check(tensor)
        if self.fsdp is not None:
            self.fsdp.check_reads((number,))
        if builder.region == "model" and builder.frame == 0:
            builder.fix(number, "stored outside the model")
        with builder.ignoring_ops():
            if builder.storages[number].op is None:
                return HeldTensor(tensor.detach(), saved, builder.add_release)
            # Backward uses integers as indices: a blank would be another step.
            exact = not (tensor.is_floating_point() or tensor.is_complex())
            exact |= tensor.untyped_storage().nbytes() <= _SMALL_BYTES
            return SavedPlaceholder(tensor, saved, builder.add_release, exact=exact)

    @never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if isinstance(packed, subclasses.PackedWrapper):
            return packed.unpack(self.unpack)
        self._builder.add_event(UNPACK, packed.saved)
        if isinstance(packed, HeldTensor):
            self._builder.add_event(DROP, packed.saved)
            return packed.tensor
        with self._builder.ignoring_ops():
            tensor: torch.Tensor = packed.unpack()
        self._live.add_copy(tensor, packed.saved)
        return tensor
