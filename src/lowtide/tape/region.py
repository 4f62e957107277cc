"""The region in which a tape sees ops: its dispatch mode, its saved-tensor hooks, its watcher of module calls."""

from __future__ import annotations

from types import TracebackType

import torch

from lowtide.tape.program import PlannedCall
from lowtide.tape.tape import Tape
from lowtide.tracing import module_calls


class TapedRegion:
    """Tape what runs inside as ``call``. Leaving takes mode, hooks and watcher away, whatever happened inside.

    Args:
        whole_step: The region may hold several steps, backward included.
    """

    __slots__ = ("_call", "_hooks", "_outer_watcher", "_tape", "_whole_step")

    def __init__(self, tape: Tape, call: PlannedCall, *, whole_step: bool) -> None:
        self._tape, self._call, self._whole_step = tape, call, whole_step

    def __enter__(self) -> Tape:
        tape = self._tape
        outer_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        tape.enter_region(self._call, whole_step=self._whole_step, outer_hooks=outer_hooks)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack)
        self._hooks.__enter__()
        try:
            tape.__enter__()
        except BaseException:
            self._hooks.__exit__()
            raise
        self._outer_watcher = module_calls.thread_state.observer
        module_calls.thread_state.observer = tape
        return tape

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        module_calls.thread_state.observer = self._outer_watcher
        try:
            self._tape.__exit__(kind, error, trace)
        finally:
            self._hooks.__exit__()
            self._tape.leave_region(failed=error is not None)
