"""Saved-tensor hooks that hold a description in place of what autograd stores, while a step is recorded."""

from collections.abc import Callable
from typing import Any

import torch

from lowtide.graph.step_graph import DROP, RELEASE, UNPACK
from lowtide.recording.compiled_regions import CompiledRegions
from lowtide.recording.graph_builder import GraphBuilder
from lowtide.recording.live_storages import LiveStorages
from lowtide.recording.opaque_calls import StoresOfCalls
from lowtide.recording.sharding import ShardingRecording
from lowtide.step import subclasses
from lowtide.step.data_assignments import DataAssignmentGuard
from lowtide.step.module_calls import never_compiled
from lowtide.step.operators import fingerprint, is_wrapper_type
from lowtide.step.seam import step_aside

_SMALL_BYTES = 1024


class _Packed:
    """What autograd holds in place of a tensor.

    ``held``: it was there before the step, so holding the tensor itself costs nothing.
    """

    __slots__ = ("builder", "held", "make", "saved")

    def __init__(self, builder: GraphBuilder, saved: int, tensor: torch.Tensor, *, held: bool, blank: float) -> None:
        self.builder, self.saved, self.held = builder, saved, held
        self.make = _maker_of(tensor, held=held, blank=blank)

    @never_compiled
    def __del__(self) -> None:
        self.builder.add_event(RELEASE, self.saved)


def _maker_of(tensor: torch.Tensor, *, held: bool, blank: float) -> Callable[[], torch.Tensor]:
    """What gives backward ``tensor``, a copy or one of the same shape that is ``blank`` everywhere."""
    if held:
        tensor = tensor.detach()
        return lambda: tensor
    # Backward uses integers as indices: a blank would be another step.
    exact = not (tensor.is_floating_point() or tensor.is_complex())
    if exact or tensor.untyped_storage().nbytes() <= _SMALL_BYTES:
        # A clone again, because the first lives longer than what backward holds, whose end is an event.
        return tensor.detach().clone().clone
    size, stride, dtype, device = tensor.size(), tensor.stride(), tensor.dtype, tensor.device
    elements = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n)
    return lambda: torch.full((elements,), blank, dtype=dtype, device=device).as_strided(size, stride)


class SavedTensorHooks:
    """``pack`` and ``unpack`` for ``torch.autograd.graph.saved_tensors_hooks``.

    Apart from the recorder, because autograd holds them: what they refer to must not lead back to autograd's nodes.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        live: LiveStorages,
        compiled: CompiledRegions,
        assignments: DataAssignmentGuard[int],
        functions: StoresOfCalls,
    ) -> None:
        self._builder, self._live, self._compiled, self._assignments = builder, live, compiled, assignments
        self._functions = functions
        self.sharding: ShardingRecording | None = None

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
        if self.sharding is not None:
            self.sharding.check_reads((number,))
        if builder.region == "model" and builder.frame == 0:
            builder.fix(number, "stored outside the model")
        with builder.ignoring_ops():
            # A kernel that multiplies what it was given, in place and unseen, leaves zeros as they are.
            blank = 1.0 if self._functions.stores else 0.0
            return _Packed(builder, saved, tensor, held=builder.storages[number].op is None, blank=blank)

    @never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if isinstance(packed, subclasses.PackedWrapper):
            return packed.unpack(self.unpack)
        self._live.makes_unseen |= step_aside()
        self._builder.add_event(UNPACK, packed.saved)
        functions = self._functions
        with self._builder.ignoring_ops(), functions.inspecting():
            tensor: torch.Tensor = packed.make()
            if functions.unpacked is not None:
                functions.unpacked.append((tensor, self._builder.saved[packed.saved], fingerprint(tensor)))
        if packed.held:
            self._builder.add_event(DROP, packed.saved)
        else:
            self._live.add_copy(tensor, packed.saved)
        if functions.given is not None:
            functions.given()
        return tensor
