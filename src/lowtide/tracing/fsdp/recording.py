"""What FSDP2 does during a recorded step: memory of gathered parameters, and storages that cross a unit's boundary.

FSDP's own operators are recorded like any others, in a frame of their own that the tape never enters. A gathered
parameter is a storage that was there before the step, of no bytes: that is what ops read. Its bytes are another
storage, made by an op of ours when FSDP gathers and freed when FSDP frees; nothing reads that one, so no recipe
seems to keep it alive.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import nn

from lowtide.graph.step_graph import FREE, Op
from lowtide.tracing.fsdp.observer import FsdpObserver
from lowtide.tracing.fsdp.units import states_of, units_of, whole_tensors
from lowtide.tracing.graph_builder import GraphBuilder
from lowtide.tracing.live_storages import LiveStorages

NAME = "lowtide.sharding.gather"
FRAME = "(sharding)"  # path of the frames in which FSDP works; no module has it
OF_THE_SHARDING = "is part of sharding"
CROSSES = "crosses the boundary of a sharded unit"


class FsdpRecording(FsdpObserver):
    """The sharding of one model while a recorder watches a step of it.

    Attributes:
        gathered: Storages of the parameters that FSDP gathers.
    """

    def __init__(self, builder: GraphBuilder, live: LiveStorages, model: nn.Module) -> None:
        self._builder, self._live, self._model = builder, live, model
        self._open_hooks = 0
        self._bytes_of: dict[int, int] = {}  # storage of a gathered parameter -> the storage that stands for its bytes
        self._units: dict[int, frozenset[int]] = {}
        self.gathered: set[int] = set()
        for unit in units_of(model):
            for tensor in whole_tensors(unit):
                number = live.id_of(tensor, "parameter")
                assert number is not None
                self.gathered.add(number)
                if not unit.unshard_in_backward:
                    builder.fix(number, "is not gathered in backward")

    @property
    def in_hook(self) -> bool:
        """One of FSDP's hooks runs now."""
        return self._open_hooks > 0

    def is_gathering(self, storage: int) -> bool:
        """A write to ``storage`` now is FSDP putting the bits there that were there before."""
        return self._open_hooks > 0 and storage in self.gathered

    @contextmanager
    def hook(self) -> Iterator[None]:
        in_forward = torch._C._current_graph_task_id() == -1
        if in_forward and not self._open_hooks:
            self._builder.enter(FRAME)
        self._open_hooks += 1
        try:
            yield
        finally:
            self._open_hooks -= 1
            if in_forward and not self._open_hooks:
                self._builder.leave()

    def gathering(self, whole: list[torch.Tensor]) -> None:
        builder = self._builder
        if not builder.recording or not whole:
            return
        backward = torch._C._current_graph_task_id() != -1
        kind = "backward" if backward else "activation"
        op = builder.begin_op()
        made = []
        for output, tensor in enumerate(whole):
            number = self._live.id_of(tensor, "parameter")
            assert number is not None
            size = tensor.numel() * tensor.itemsize
            self._bytes_of[number] = builder.add_storage(size, kind, op=op, output=output, fixed=OF_THE_SHARDING)
            made.append(self._bytes_of[number])
        signature = builder.add_signature({"op": NAME}, recorded_ms=0.0)
        builder.ops.append(Op(op, NAME, builder.frame, backward, (), tuple(made), signature=signature))

    def freed(self, whole: list[torch.Tensor]) -> None:
        for tensor in whole:
            number = self._live.id_of(tensor, "parameter")
            if number in self._bytes_of:
                self._builder.add_event(FREE, self._bytes_of.pop(number))

    def check_reads(self, storages: tuple[int, ...]) -> None:
        """Fix those of ``storages`` that were made in a unit's call around which the present module call is not.

        The present call reads them, or autograd stores them there: the parameters of their maker may be freed by then.
        """
        builder = self._builder
        inside = self._units_around(builder.frame)
        for number in storages:
            maker = builder.storages[number].op
            if maker is not None and not self._units_around(builder.ops[maker].frame) <= inside:
                builder.fix(number, CROSSES)

    @cached_property  # and not before: FSDP decides when the first forward pass begins
    def _freed_after_forward(self) -> list[str]:
        states = states_of(self._model)
        return [path for path, state in states if any(u._reshard_after_forward for u in state._fsdp_param_groups)]

    def _units_around(self, frame: int) -> frozenset[int]:
        """Calls of units that are freed after forward, among the calls around ``frame``."""
        if frame not in self._units:
            call = self._builder.frames[frame]
            outer = self._units_around(call.parent) if call.parent >= 0 else frozenset()
            is_unit = frame and call.path in self._freed_after_forward
            self._units[frame] = outer | {frame} if is_unit else outer
        return self._units[frame]
