"""Which ops a step runs where the shapes of its calls do not say: by numbers it is given, or as most steps do."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import Any

from lowtide.shapes.call_shapes import CallShape

_MOST_BY_NUMBERS = 8  # kinds of steps: where there are more, the numbers count steps, perhaps, or tokens
_MOST_NUMBERS = 64  # in one call's arguments: more of them are data
_REMEMBERED = 16  # steps of a pattern
_IN_A_ROW = 6  # steps of other kinds: from now on they may all be
_MUCH_MORE = 2  # times as often as a kind that has a plan
_GONE = 3  # steps in a row of other kinds, and so many of one
_OFTEN = 4  # of those remembered: less often a plan is not worth making
_MOST_IN_VAIN = 6  # recorded steps of rarer kinds: what was usual is not any more


class WholeNumbers:
    """Whole numbers among a call's arguments, as part of its shape: how many passes it makes, which layers it skips.

    They may mean nothing of that kind, so a model's are only looked at once a step ran other ops than planned.
    """

    def __init__(self) -> None:
        self._are_looked_at = self._vary = False
        self._seen: set[str] = set()

    def look(self) -> None:
        """A step ran other ops than planned."""
        self._are_looked_at = not self._vary

    def added_to(self, shape: CallShape, args: tuple, kwargs: dict) -> CallShape:
        """``shape`` of a call with these arguments, with their numbers if steps of few kinds come of that."""
        if not self._are_looked_at:
            return shape
        numbers = list(_whole_numbers((args, kwargs)))
        if not 0 < len(numbers) <= _MOST_NUMBERS:
            return shape
        told = " ".join(map(str, numbers))
        self._seen.add(told)
        if len(self._seen) > _MOST_BY_NUMBERS:
            self._are_looked_at, self._vary = False, True
            return shape
        return shape._replace(pattern=f"{shape.pattern} with {told}") if len(self._seen) > 1 else shape


def _whole_numbers(value: Any) -> Iterator[int]:
    if type(value) is int:
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _whole_numbers(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _whole_numbers(part)


class UsualKinds:
    """Of steps whose calls have one pattern, which run other ops from time to time (dropped layers): the usual ones.

    A step's kind is what ``RunningStep.kind`` says. Where a plan was of a rarer kind, no step is recorded until some
    kind is usual, each time for twice as long: till then steps run online, which costs less.
    """

    def __init__(self) -> None:
        self._last: dict[str, deque[int | None]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._waiting: dict[str, int] = {}  # patterns, and for how many steps
        self._times_waited: Counter[str] = Counter()
        self._in_vain: Counter[str] = Counter()  # recorded steps of rarer kinds

    def note(self, pattern: str, kind: int | None) -> None:
        """A step has ended."""
        self._last[pattern].append(kind)
        if pattern in self._waiting:
            self._waiting[pattern] += 1

    def is_usual(self, pattern: str, kind: int | None) -> bool:
        """Whether such steps still come, and none of another kind that does comes much more often."""
        if kind is None:
            return False
        last = list(self._last[pattern])
        come = Counter(last[-_IN_A_ROW:])
        if kind in come:
            return all(last.count(other) <= _MUCH_MORE * last.count(kind) for other in come if other is not None)
        return self.is_often(pattern, kind) and len(come) > 1

    def vary(self, pattern: str) -> bool:
        """Whether steps of several kinds have come lately."""
        return len({*self._last[pattern]} - {None}) > 1

    def is_gone(self, pattern: str, kind: int | None) -> bool:
        """Whether such steps do not come any more, and those of one other kind do."""
        lately = list(self._last[pattern])[-_IN_A_ROW:]
        return (
            kind is not None
            and kind not in lately[-_GONE:]
            and any(lately.count(k) >= _GONE for k in {*lately} - {kind, None})
        )

    def is_often(self, pattern: str, kind: int | None) -> bool:
        """Whether such steps are worth a plan."""
        return kind is not None and self._last[pattern].count(kind) >= _OFTEN

    def wait_for_usual(self, pattern: str) -> None:
        """A plan was of a rarer kind."""
        self._waiting[pattern] = self._in_vain[pattern] = 0
        self._times_waited[pattern] += 1
        self._last[pattern].clear()

    def waits(self, pattern: str) -> bool:
        """Whether no kind has been usual since, or not for long enough."""
        if pattern not in self._waiting:
            return False
        least = _REMEMBERED * (2 ** (self._times_waited[pattern] - 1) - 1)
        kinds = set(self._last[pattern])
        return self._waiting[pattern] < least or not any(self.is_often(pattern, kind) for kind in kinds)

    def waits_in_vain(self, pattern: str) -> bool:
        """Whether that has gone on for so long that it is told; once."""
        return self._waiting.get(pattern) == 2 * _REMEMBERED

    def is_worth_a_plan(self, pattern: str, kind: int | None) -> bool:
        """Whether a recorded step is to be planned: not where another kind was waited for."""
        if pattern not in self._waiting or self.is_often(pattern, kind):
            self._waiting.pop(pattern, None)
            return True
        self._in_vain[pattern] += 1
        if self._in_vain[pattern] == _MOST_IN_VAIN:
            self._in_vain[pattern] = 0
            self._last[pattern].clear()
        return False

    def clear(self) -> None:
        self._last.clear()
        self._waiting.clear()
        self._times_waited.clear()
        self._in_vain.clear()
