"""What FSDP2 does during a recorded step: memory that comes and goes with gathered parameters, and what crosses a unit.

FSDP's own operators are recorded like any others, in a frame of their own that the tape never enters. A gathered
parameter is a storage that was there before the step, of no bytes: that is what ops read. Its bytes are another
storage, made by an op of ours when FSDP gathers and freed when FSDP frees; nothing reads that one, so no recipe
seems to keep it alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from lowtide.graph.step_graph import FREE, RUN, Op
from lowtide.tracing import fsdp

if TYPE_CHECKING:
    from lowtide.tracing.recorder import Recorder

NAME = "lowtide.sharding.gather"
FRAME = "(sharding)"  # path of the frames in which FSDP works; no module has it
OF_THE_SHARDING = "is part of sharding"
CROSSES = "crosses the boundary of a sharded unit"


class FsdpRecording:
    """The sharding of one model while a recorder watches a step of it."""

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self._recorder, self._model = recorder, model
        self._at_work = 0
        self._bytes_of: dict[int, int] = {}  # storage of a gathered parameter -> the storage that stands for its bytes
        self._freed_after_forward: frozenset[str] | None = None
        self._units: dict[int, frozenset[int]] = {}
        self.gathered: set[int] = set()
        for unit in fsdp.units_of(model):
            for tensor in fsdp.whole_tensors(unit):
                number = recorder.know(tensor, "parameter")
                assert number is not None
                self.gathered.add(number)
                if not unit.unshard_in_backward:
                    recorder.fix(number, "is not gathered in backward")

    @property
    def at_work(self) -> bool:
        return self._at_work > 0

    @contextmanager
    def work(self) -> Iterator[None]:
        """FSDP's hooks run inside."""
        in_forward = torch._C._current_graph_task_id() == -1
        if in_forward and not self._at_work:
            self._recorder.enter(FRAME)
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1
            if in_forward and not self._at_work:
                self._recorder.leave()

    def gathers(self, whole: list[torch.Tensor]) -> None:
        """FSDP is about to take memory for ``whole``."""
        recorder = self._recorder
        if not recorder.listens:
            return
        backward = torch._C._current_graph_task_id() != -1
        op = len(recorder.ops)
        made = []
        for tensor in whole:
            number = recorder.know(tensor, "parameter")
            assert number is not None
            self._bytes_of[number] = len(recorder.storages)
            made.append(len(recorder.storages))
            recorder.storages.append(
                {"bytes": tensor.numel() * tensor.itemsize, "kind": "backward" if backward else "activation",
                 "op": op, "output": len(made) - 1, "fixed": OF_THE_SHARDING}
            )  # fmt: skip
        if made:
            recorder.event(RUN, op)
            signature = recorder.signatures_seen.add({"op": NAME, "ms": 0.0})
            recorder.ops.append(Op(op, NAME, recorder.frame, backward, (), tuple(made), signature=signature))

    def frees(self, whole: list[torch.Tensor]) -> None:
        for tensor in whole:
            stands_for = self._bytes_of.pop(self._recorder.know(tensor, "parameter") or -1, None)
            if stands_for is not None:
                self._recorder.event(FREE, stands_for)

    def read(self, storages: tuple[int, ...]) -> None:
        """Something reads, or autograd stores, these in the present module call: who made them must be whole then."""
        recorder = self._recorder
        inside = self._units_around(recorder.frame)
        for number in storages:
            maker = recorder.storages[number]["op"]
            if maker is not None and not self._units_around(recorder.ops[maker].frame) <= inside:
                recorder.fix(number, CROSSES)

    def _units_around(self, frame: int) -> frozenset[int]:
        """Calls of units that are freed after forward, among the calls around ``frame``."""
        if self._freed_after_forward is None:  # FSDP decides when the first forward pass begins
            self._freed_after_forward = frozenset(
                path
                for path, state in fsdp.states_of(self._model)
                if any(unit._reshard_after_forward for unit in state._fsdp_param_groups)
            )
        known = self._units.get(frame)
        if known is None:
            call = self._recorder.frames[frame]
            outer = self._units_around(call.parent) if call.parent >= 0 else frozenset()
            known = outer | {frame} if frame and call.path in self._freed_after_forward else outer
            self._units[frame] = known
        return known
