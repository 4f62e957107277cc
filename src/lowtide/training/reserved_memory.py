"""Steps without a plan under ``budget_kind="reserved"``: part of the budget is kept for segments that do not fill.

Without a plan a step can keep to a number of allocated bytes, but what the allocator reserves for them is known only
afterwards. So ``bytes_for_segments`` takes an estimate off the budget, and a step that reserved more than the budget is
reported. Reserved memory stays reserved, so the cache is emptied before the first step with a plan, whose prediction
starts without cached segments. Workspaces of the BLAS library lie between what were activations of earlier steps, and
would hold their segments: they are given back, too, and taken again in that step. Plans themselves are searched in
``solvers/reserved_budget.py``.
"""

import torch

from lowtide.device.kept_workspaces import give_back_workspaces
from lowtide.device.memory import release_cached_memory
from lowtide.device.names import index_of, is_accelerator
from lowtide.training.notices import Notices
from lowtide.training.planned_step import PlannedStep
from lowtide.units import format_bytes

_LAST_SEGMENTS_BYTES = 22 << 20  # one of each pool, hardly filled
_UNFILLED = 1 / 16  # of what a step makes, between blocks that live
_MOST = 0.5  # of what a step may make


def bytes_for_segments(room_bytes: int) -> int:
    """Of so many bytes that a step may reserve: what it leaves for segments that are not full."""
    return min(_LAST_SEGMENTS_BYTES + int(_UNFILLED * room_bytes), int(_MOST * room_bytes))


class ReservedMemory:
    """Of one model's steps."""

    def __init__(self, reasons: Notices) -> None:
        self._reasons = reasons
        self._watches = False  # a step without a plan has begun
        self._over_bytes, self._over_reason = 0, ""

    def begin_step(self, step: PlannedStep | None, device: torch.device) -> None:
        """A step begins under this plan, or without one: the first of its kind starts with nothing cached."""
        begun = self._watches if step is None else step.begun
        if step is None:
            self._watches = True
        else:
            step.begun = True
        if not begun:
            if step is not None:
                give_back_workspaces(device)
            release_cached_memory()

    def note_watched(self, device: torch.device, budget_bytes: int) -> None:
        """A step without a plan is over; segments stay until they are given back."""
        if not is_accelerator(device):
            return
        over = torch.accelerator.memory_reserved(index_of(device)) - budget_bytes
        if over <= self._over_bytes:
            return
        reason = (
            f"a step that ran online had up to {format_bytes(over)} more reserved than the budget: what the allocator "
            "reserves for a step is foreseen under a plan only"
        )
        if self._over_bytes:
            self._reasons.correct(self._over_reason, reason)
        else:
            self._reasons.say(reason)
        self._over_bytes, self._over_reason = over, reason
