"""Milliseconds per op, on one device: plain data that ``measure`` or ``estimate`` fills in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """What each op of one graph costs.

    Attributes:
        op_ms: Milliseconds by op id, forward and backward.
        mode_us: Added by the tape to every forward op it watches.
        record_us: Added once more to each op whose output is dropped.
        replay_us: Added to each replayed op beyond the op's own time.
        source: ``measured`` or ``estimated``.
        device_name: Where, or for what.
    """

    op_ms: tuple[float, ...]
    mode_us: float = 0.0
    record_us: float = 0.0
    replay_us: float = 0.0
    source: str = "measured"
    device_name: str = "cpu"

    @property
    def plain_step_ms(self) -> float:
        """Forward and backward of the plain step."""
        return sum(self.op_ms)
