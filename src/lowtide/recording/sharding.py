"""What FSDP2 or ZeRO-3 does during a recorded step: memory of gathered parameters, and what leaves their windows.

Their own operators are recorded like any others, in a frame of their own that the tape never enters. A gathered
parameter is a storage that was there before the step, of no bytes: that is what ops read. Its bytes are another
storage, made when it is gathered and freed when it is freed; nothing reads that one, so no recipe seems to keep it
alive. FSDP resizes a storage, so there an op of ours makes the bytes; DeepSpeed's own operators make them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import nn

from lowtide.graph.step_graph import FREE, Op
from lowtide.recording.graph_builder import GraphBuilder
from lowtide.recording.live_storages import LiveStorages
from lowtide.step.sharding.observer import ShardingObserver
from lowtide.step.sharding.units import units_of, whole_tensors
from lowtide.step.sharding.windows import CROSSES, NOT_AGAIN, OUT_OF_WINDOW, Windows
from lowtide.step.sharding.zero3 import gathered_parameters_of

NAME = "lowtide.sharding.gather"
FRAME = "(sharding)"  # path of the frames in which parameters are gathered and freed; no module has it
OF_THE_SHARDING = "is part of sharding"


class ShardingRecording(ShardingObserver):
    """The sharding of one model while a recorder watches a step of it.

    Attributes:
        gathered: Storages of the parameters that are gathered.
    """

    def __init__(self, builder: GraphBuilder, live: LiveStorages, model: nn.Module) -> None:
        self._builder, self._live = builder, live
        self._open_hooks = 0
        self._bytes_of: dict[int, int] = {}  # storage of a gathered parameter -> the storage that stands for its bytes
        self._units: dict[int, frozenset[int]] = {}
        self.gathered: set[int] = set()
        self._windows = Windows(model)
        self._partitioned: dict[nn.Parameter, int] = {}  # by ZeRO-3: the storage that stands for each
        self._whole = gathered_parameters_of(model)
        if self._whole is not None:
            # Not their memory: that may have been whole before the step, and is freed in it.
            self._partitioned = {p: builder.add_storage(0, "parameter") for p in self._windows.gathered_for}
            self.gathered.update(self._partitioned.values())
        for unit in units_of(model):
            for tensor in whole_tensors(unit):
                number = live.id_of(tensor, "parameter")
                assert number is not None
                self.gathered.add(number)
                if not unit.unshard_in_backward:
                    builder.fix(number, NOT_AGAIN)

    @property
    def in_hook(self) -> bool:
        """Parameters are gathered or freed now."""
        return self._open_hooks > 0

    def is_gathering(self, storage: int) -> bool:
        """A write to ``storage`` now is FSDP putting the bits there that were there before."""
        return self._open_hooks > 0 and storage in self.gathered

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """What ops read that read ``tensor``, which is over the memory of a parameter of ZeRO-3; else None."""
        if self._whole is None or self._open_hooks:
            return None
        parameter = self._whole.parameter_of(tensor)
        return None if parameter is None else self._partitioned.get(parameter)

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

    def why_fixed(self, reads: tuple[int, ...]) -> str:
        """Why what an op makes of ``reads`` must be saved; "" if it may be recomputed."""
        self.check_reads(reads)
        if self.in_hook:
            return OF_THE_SHARDING
        needed = set(reads) & self._gathered_for.keys()
        if needed:
            around = {self._builder.frames[call].path for call in self._units_around(self._builder.frame)}
            if any(around.isdisjoint(self._gathered_for[number]) for number in needed):
                return OUT_OF_WINDOW
        return ""

    @cached_property
    def _gathered_for(self) -> dict[int, set[str]]:
        """By storage of a parameter of ZeRO-3, the modules in whose windows it is whole."""
        return {self._partitioned[p]: paths for p, paths in self._windows.gathered_for.items()}

    def _units_around(self, frame: int) -> frozenset[int]:
        """Calls of units that are freed after forward, among the calls around ``frame``."""
        if frame not in self._units:
            call = self._builder.frames[frame]
            outer = self._units_around(call.parent) if call.parent >= 0 else frozenset()
            is_unit = frame and call.path in self._windows.paths
            self._units[frame] = outer | {frame} if is_unit else outer
        return self._units[frame]
