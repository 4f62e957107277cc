"""The audit: replays compared bitwise with the tensors that they replace."""

from __future__ import annotations

from collections.abc import Callable

from lowtide.tape.program import PlannedOp, PlanProgram


class Audit:
    """Which dropped tensors of a forward pass stay in memory, so that their replays can be compared with them.

    Args:
        allowance_bytes: Most bytes that may stay.
        on_difference: Called with each op whose replay differed. Its outputs are saved from then on.
    """

    def __init__(self, program: PlanProgram, allowance_bytes: int, on_difference: Callable[[PlannedOp], None]) -> None:
        self._bytes_left = allowance_bytes
        self._on_difference = on_difference
        self._pending = {id(op) for op in program.unaudited()}

    def claim(self, op: PlannedOp, size: int) -> bool:
        """Whether an output of ``op`` stays; takes its ``size`` from the allowance."""
        if id(op) not in self._pending or size > self._bytes_left:
            return False
        self._bytes_left -= size
        return True

    def result(self, op: PlannedOp, equal: bool) -> None:
        """An output of ``op`` has been compared."""
        op.audited = True
        if not equal:
            op.drops = ()
            self._on_difference(op)
