"""The ops of a plan that have nothing to be done, as they run without the tape: it asks how far they have got."""

import sys
import weakref
from typing import Any, Protocol

from torch._ops import OpOverload

from lowtide.device import planned_ops
from lowtide.device.allocation_counter import LiveBytes
from lowtide.device.planned_ops import Position
from lowtide.step.operators import may_run_others
from lowtide.tape.planned_bytes import PlannedBytes
from lowtide.tape.program import TapedCall, TapedOp


class OpenCall(Protocol):
    """A module call that runs; ``next`` is the index of the op that is to come."""

    next: int


class FollowedOps:
    """Of one tape, on one thread at a time, where another tape's may take their place.

    Attributes:
        is_on: Ops of a module call run without the tape now.
    """

    __slots__ = ("__weakref__", "_call", "_known", "_mode", "_planned_bytes", "_position", "is_on")

    def __init__(self, mode: Any) -> None:
        self._mode = id(mode)
        self._position: Position | None = None
        self._call: OpenCall | None = None  # whose ops they are
        self._known: dict[TapedCall, int] = {}
        self._planned_bytes: PlannedBytes | None = None  # that these know
        self.is_on = False
        _all[self._mode] = self

    def start_here(self, planned_bytes: PlannedBytes | None) -> None:
        """A forward pass begins on this thread. ``planned_bytes``: what lives in it; None: nobody counts."""
        self.end()
        if planned_bytes is not self._planned_bytes:
            self._forget()
            self._planned_bytes = planned_bytes
        self._position = planned_ops.position()
        self._take_place(self._position)

    def _take_place(self, position: Position) -> None:
        if (other := _all.get(position.mode or 0)) is not None and other is not self:
            other.end()
        position.call, position.mode, position.live_bytes = None, self._mode, None
        planned = self._planned_bytes
        if planned is not None and isinstance(live := planned.now, LiveBytes):
            position.live_bytes = live.place
            position.more_bytes = live.less_bytes + planned.allowance_bytes

    def begin(self, call: OpenCall, planned: TapedCall) -> None:
        """The ops of ``call`` are to come, which is planned so."""
        position = self._position
        if position is None:
            return
        if position.mode != self._mode:
            self._take_place(position)
        known, bytes_planned = self._known.get(planned), self._planned_bytes
        if known is None:
            live = [0 if bytes_planned is None else bytes_planned.before(op.number) for op in planned.ops]
            known = self._known[planned] = planned_ops.known_ops([_runs_alone(op) for op in planned.ops], live)
        if bytes_planned is not None:
            position.unsplit_bytes = bytes_planned.unsplit_lately
        self._call, position.next, position.call = call, call.next, known
        self.is_on = True

    def catch_up(self) -> None:
        """The call knows which of its ops is to come."""
        if self.is_on and self._call is not None and self._position is not None:
            self._call.next = self._position.next

    def advance(self) -> None:
        """The call says which of its ops is to come."""
        if self.is_on and self._call is not None and self._position is not None:
            self._position.next = self._call.next

    def end(self) -> None:
        """Each op is the tape's from here on."""
        if self.is_on and self._position is not None:
            self.catch_up()
            self._position.call = None
            self.is_on = False
            self._call = None

    def _forget(self) -> None:
        for known in self._known.values():
            planned_ops.forget(known)
        self._known.clear()

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # None: a module's names are gone before what it made
            self.end()
            self._forget()


_all: weakref.WeakValueDictionary[int, FollowedOps] = weakref.WeakValueDictionary()  # by id of the mode


def _runs_alone(op: TapedOp) -> OpOverload | None:
    """Its operator if the tape has nothing to do where it runs."""
    if op.acts or not isinstance(op.func, OpOverload):
        return None
    return None if may_run_others(op.func) else op.func
