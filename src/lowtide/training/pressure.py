"""Memory that others take and give back while a model trains: an automatic budget follows what is free.

An automatic budget shrinks at a look between two steps, as soon as nine tenths (``1 - AUTO_MARGIN``) of the available
memory are more than 1/32 below what a step may make. It grows back only after three such looks in a row found 1/16
more, and never above what it was at first, since each move may have plans made again.
"""

import time

from torch import nn

from lowtide.training.budget import StepBudget, in_steps

_SECONDS_BETWEEN_LOOKS = 1.0  # a look takes 0.3 ms
# Of what the step may make. They lie apart, so that free memory which goes to and fro moves nothing.
_SHRINKS_BELOW = 1 - 1 / 32
_GROWS_ABOVE = 1 + 1 / 16
_LOOKS_BEFORE_GROWTH = 3


class MemoryPressure:
    """Free memory, looked at between steps."""

    def __init__(self, budget: StepBudget) -> None:
        self._budget = budget
        self._next_look_s = time.monotonic() + _SECONDS_BETWEEN_LOOKS
        self._higher: list[int] = []  # what the last looks found, each enough to grow

    def new_budget_bytes(self, model: nn.Module) -> int | None:
        """What the budget should be from now on; None: as it is. Call it when nothing of a step lives."""
        budget = self._budget
        now_s = time.monotonic()
        if not budget.is_automatic or now_s < self._next_look_s:
            return None
        self._next_look_s = now_s + _SECONDS_BETWEEN_LOOKS
        assert budget.absolute_bytes is not None and budget.most_bytes is not None
        budget.read_memory(model)
        free = budget.free_bytes()
        room = budget.absolute_bytes - budget.resident_bytes
        if free <= _GROWS_ABOVE * room:
            self._higher.clear()
            return budget.resident_bytes + in_steps(free) if free < _SHRINKS_BELOW * room else None
        self._higher.append(free)
        if len(self._higher) < _LOOKS_BEFORE_GROWTH:
            return None
        grown = min(budget.most_bytes, budget.resident_bytes + in_steps(min(self._higher)))
        self._higher.clear()
        return grown if grown > budget.absolute_bytes else None
