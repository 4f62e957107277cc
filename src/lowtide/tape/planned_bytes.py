"""What lives after each op of a planned step, and whether so much more does that the step will not keep its budget.

Sizes may depend on data, and a batch may hide them in an object: then a step runs the planned ops, and takes more. What
lives is looked at where a module call begins or ends, and before ops that the tape sees: where half a tolerance more
was to be made since the last look, and every eighth op. Ops that run without the tape (``followed_ops.py``) are looked
at one by one, in C++, and are the tape's where more lives than may without a closer look. An allocator counts a large
block whole, also what nobody asked for of it: that is no sign of other sizes, and which block it takes depends on what
ran before.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from lowtide.tape.program import TapedCall

TOLERANCE = 0.01  # of what may live
_WORTH_A_LOOK = 0.1  # of what may live: a call that adds less is not looked into
_OWN_BYTES = 1 << 16  # what the tape itself may take
_LOOKS_EVERY = 8  # ops, where little is made in between
_ASKED_EVERY = 16  # looks: the allocator for what it has not split off, which takes as long as an op


def _none() -> int:
    return 0


class PlannedBytes:
    """Of one plan.

    Args:
        before, after: What a step has made and still holds before and after each of its forward ops.
        peak: The most that it makes and holds.

    Attributes:
        now: What the present step has made and still holds now; None: nobody counts.
        passed_by: How much more than planned lived where it went past the plan; 0: it has not.
        unsplit_lately: So much of what lives nobody had asked for when the allocator was asked last.
    """

    def __init__(self, before: Sequence[int], after: Sequence[int], peak: int) -> None:
        self._before, self.after = before, after
        # Made in all before each op, and after the last.
        self._made = [0, *accumulate(max(0, now - was) for was, now in zip(before, after, strict=True))]
        self._looked_at, self._place = 0, -_LOOKS_EVERY  # what was made in all at the last look, and where that was
        self._peak, self._most, self._tolerance = peak, 0, 0.0
        self.now: Callable[[], int | None] = _nobody_counts
        self._unsplit: Callable[[], int] = _none
        self._unsplit_before = 0  # the step
        self.unsplit_lately, self._looks = 0, 0  # what it was in the step, so many looks ago
        self._start = self._planned_start = self._offset = 0  # when the call began: what lived, was planned, was beside
        self._allowance = 0.0  # so much more than planned may live without a closer look
        self._rises: dict[TapedCall, bool] = {}
        self.passed_by = 0

    def begin_step(self, most: int, now: Callable[[], int | None], unsplit: Callable[[], int] = _none) -> None:
        """Another step begins, which may make and hold ``most``; ``unsplit`` of what lives, nobody has asked for."""
        self.now, self.passed_by = now, 0
        self._unsplit, self._unsplit_before = unsplit, unsplit()
        self.unsplit_lately = self._looks = 0
        if max(self._peak, most) != self._most:
            self._most = max(self._peak, most)
            self._tolerance = TOLERANCE * self._most + _OWN_BYTES
            self._rises.clear()

    def begin_call(self, call: TapedCall) -> None:
        """A call of the model begins: what lives beyond the plan is somebody else's, and does not grow with it."""
        start = self.now()
        if start is None:
            self.now = _nobody_counts
            return
        planned = self._before[call.first_op] if call.last_op >= 0 else 0
        self._start, self._planned_start, self._offset = start, planned, max(0, start - planned)
        self._place = -_LOOKS_EVERY
        self._allowance = start - planned + self._tolerance - self._offset

    def rises_in(self, call: TapedCall) -> bool:
        """Whether ``call`` makes so much that it is worth a look inside."""
        found = self._rises.get(call)
        if found is None:
            inside = self.after[call.first_op : call.last_op + 1]
            found = bool(inside) and max(inside) - self._before[call.first_op] > _WORTH_A_LOOK * self._most
            self._rises[call] = found
        return found

    def before(self, op: int) -> int:
        """What lives before forward op ``op``."""
        return self._before[op]

    @property
    def allowance_bytes(self) -> int:
        """So much more may live, in the present call, before the next op is worth a look."""
        return int(self._allowance)

    def is_passed(self, op: int, *, has_run: bool) -> bool:
        """Whether so much lives, before forward op ``op`` or after it ``has_run``, that the step takes too much."""
        place = op + has_run
        made = self._made[place]
        if abs(place - self._place) < _LOOKS_EVERY and abs(made - self._looked_at) < 0.5 * self._tolerance:
            return False
        self._looked_at, self._place = made, place
        now = self.now()
        planned = self.after[op] if has_run else self._before[op]
        if now is None or now <= planned + self._allowance:
            return False
        self._looks += 1
        if self._looks % _ASKED_EVERY and now - self.unsplit_lately <= planned + self._allowance:
            return False
        now -= self._unsplit_in_step()
        if now <= planned + self._allowance:
            return False
        grown, planned = now - self._start, planned - self._planned_start
        excess = max(0, grown - planned)
        ratio = 1.0 if excess <= self._tolerance else grown / max(planned, 1)
        if self._peak * ratio + self._offset <= self._most + self._tolerance:
            return False
        self.passed_by = excess + self._offset
        return True

    def is_full(self) -> bool:
        """Whether as much lives as may, at a place that the plan does not know."""
        now = self.now()
        if now is None or now <= self._most:
            return False
        now -= self._unsplit_in_step()
        if now <= self._most:
            return False
        self.passed_by = max(0, now - self._peak)
        return True

    def _unsplit_in_step(self) -> int:
        self.unsplit_lately = max(0, self._unsplit() - self._unsplit_before)
        return self.unsplit_lately


def _nobody_counts() -> None:
    return None
