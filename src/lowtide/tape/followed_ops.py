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
from lowtide.tape.program import PlanProgram, TapedCall, TapedOp


class OpenCall(Protocol):
    """A module call that runs; ``next`` is the index of the op that is to come."""

    next: int


class FollowedOps:
    """Of one tape, on one thread at a time, where another tape's may take their place.

    Attributes:
        is_on: Ops of a module call run without the tape now.
        position: How far they have got; of the thread whose forward pass began last.
    """

    __slots__ = ("__weakref__", "_call", "_known", "_mode", "is_on", "position")

    def __init__(self, mode: Any) -> None:
        self._mode = id(mode)
        self.position: Position = planned_ops.position()
        self._call: OpenCall | None = None  # whose ops they are
        self._known = _KnownOps(None)
        self.is_on = False

    def start_here(self, program: PlanProgram, planned_bytes: PlannedBytes | None) -> None:
        """A forward pass of ``program`` begins on this thread.

        Args:
            planned_bytes: What lives in it; None: nobody counts.
        """
        self.end()
        self._known = _known_of(program, planned_bytes)
        self.position = planned_ops.position()
        self._take_place()

    def _take_place(self) -> None:
        position = self.position
        other = None if position.owner is None else position.owner()
        if other is not None and other is not self:
            other.end()
        position.owner = weakref.ref(self)
        position.call, position.mode, position.live_bytes = None, self._mode, None
        planned = self._known.planned_bytes
        if planned is not None and isinstance(live := planned.now, LiveBytes):
            position.live_bytes = live.place
            position.more_bytes = live.less_bytes + planned.allowance_bytes

    def begin(self, call: OpenCall, planned: TapedCall) -> None:
        """The ops of ``call`` are to come, which is planned so."""
        position = self.position
        if position.owner is None or position.owner() is not self:
            self._take_place()
        known = self._known
        if known.planned_bytes is not None:
            position.unsplit_bytes = known.planned_bytes.unsplit_lately
        self._call, position.next, position.call = call, call.next, known.of_call.get(planned) or known.add(planned)
        self.is_on = True

    def catch_up(self) -> None:
        """The call knows which of its ops is to come."""
        if self._call is not None:
            self._call.next = self.position.next

    def advance(self) -> None:
        """The call says which of its ops is to come."""
        if self._call is not None:
            self.position.next = self._call.next

    def end(self) -> None:
        """Each op is the tape's from here on."""
        if self.is_on:
            self.catch_up()
            self.position.call = self._call = None
            self.is_on = False

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # None: a module's names are gone before what it made
            self.end()


class _KnownOps:
    """The ops of a plan as C++ knows them, by module call, each with what is planned to live before it."""

    __slots__ = ("of_call", "planned_bytes")

    def __init__(self, planned_bytes: PlannedBytes | None) -> None:
        self.of_call: dict[TapedCall, int] = {}
        self.planned_bytes = planned_bytes

    def add(self, call: TapedCall) -> int:
        planned = self.planned_bytes
        live = [0 if planned is None else planned.before(op.number) for op in call.ops]
        known = self.of_call[call] = planned_ops.known_ops([_runs_alone(op) for op in call.ops], live)
        return known

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():
            for known in self.of_call.values():
                planned_ops.forget(known)


_of_programs: weakref.WeakKeyDictionary[PlanProgram, _KnownOps] = weakref.WeakKeyDictionary()


def _known_of(program: PlanProgram, planned_bytes: PlannedBytes | None) -> _KnownOps:
    """Those of the last forward pass of ``program``, if what was to live was the same."""
    found = _of_programs.get(program)
    if found is None or found.planned_bytes is not planned_bytes:
        found = _of_programs[program] = _KnownOps(planned_bytes)
    return found


def _runs_alone(op: TapedOp) -> OpOverload | None:
    """Its operator if the tape has nothing to do where it runs."""
    if op.acts or not isinstance(op.func, OpOverload):
        return None
    return None if may_run_others(op.func) else op.func
