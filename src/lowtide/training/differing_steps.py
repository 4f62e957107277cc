"""Steps that ran other ops than their plan knows, or took more: what becomes of the plan."""

from collections import Counter, defaultdict, deque
from enum import Enum, auto

from lowtide.shapes.call_shapes import CallShape
from lowtide.training.kinds_of_steps import UsualKinds
from lowtide.training.planned_step import PlannedStep

STEPS_REMEMBERED = 8  # of one pattern: where most of them took more than planned, no plan fits
MOST_REPLANS = 2  # of one shape, when its steps turn out to run other ops than the plan knows


class Verdict(Enum):
    """On a plan whose last step ran other ops."""

    KEEP = auto()
    NOT_FOR_THIS_SHAPE = auto()  # that it covers, and is not its own
    LET_GO = auto()
    NO_PLAN_FITS = auto()  # steps of its pattern run other ops each time


class DifferingSteps:
    """Of one model.

    Attributes:
        alone: Shapes whose steps run other ops than the plans that cover them.
        unsteady: Patterns whose steps run other ops each time.
        kinds: Of steps whose calls do not say which ops they run.
    """

    def __init__(self) -> None:
        self.alone: set[CallShape] = set()
        self.unsteady: set[str] = set()
        self.kinds = UsualKinds()
        # Of the last planned steps of each pattern: did they run other ops?
        self._differed: dict[str, deque[bool]] = defaultdict(lambda: deque(maxlen=STEPS_REMEMBERED))
        self._replans: Counter[CallShape] = Counter()

    def note(self, pattern: str, *, differed: bool) -> None:
        """A step has ended that began under a plan for this pattern."""
        self._differed[pattern].append(differed)

    def note_worthless(self, planned: PlannedStep) -> None:
        """The last step ran the ops of ``planned``, and took more than it is worth."""
        planned.diverged, planned.kind = True, None
        if steps := self._differed[planned.shapes[0].pattern]:
            steps[-1] = True

    def may_differ(self, pattern: str) -> bool:
        """Whether steps of this pattern may run other ops than planned, as others have: each op is followed then."""
        return any(self._differed[pattern]) or self.kinds.vary(pattern)

    def run_online(self, pattern: str) -> bool:
        """Whether steps of this pattern have no plan and ask for none: for good, or until one kind of them is usual."""
        return pattern in self.unsteady or self.kinds.waits(pattern)

    def lately(self, pattern: str) -> tuple[int, int]:
        """How many of the last planned steps ran other ops; of how many."""
        steps = self._differed[pattern]
        return sum(steps), len(steps)

    def judge(self, planned: PlannedStep) -> Verdict:
        """The last step under ``planned`` ran other ops, or took too much."""
        shape, own = planned.last_served, planned.shapes[0]
        num_differed, num_steps = self.lately(own.pattern)
        is_full, out_of_replans = num_steps == STEPS_REMEMBERED, self._replans[own] >= MOST_REPLANS
        is_usual = self.kinds.is_usual(own.pattern, planned.kind)
        if planned.kind is None:  # its steps take more than it is worth, or nobody knows its kind
            is_unsteady = (out_of_replans or is_full) and 2 * num_differed > num_steps
        else:
            is_unsteady = is_usual and is_full and num_differed == num_steps  # of these modules, of other sizes
        if is_unsteady:
            self.unsteady.add(own.pattern)
            return Verdict.NO_PLAN_FITS
        if shape != own and not is_usual and self.kinds.is_gone(own.pattern, planned.kind):
            # Not for that shape: it fits no step that comes now.
            self.alone -= {other for other in self.alone if other.pattern == own.pattern}
            return Verdict.LET_GO
        if shape is not None and shape != own:
            self.alone.add(shape)
            return Verdict.NOT_FOR_THIS_SHAPE
        if is_usual or (planned.kind is None and out_of_replans):
            return Verdict.KEEP
        if planned.kind is None:
            self._replans[own] += 1
        else:
            self.kinds.wait_for_usual(own.pattern)
            self._differed[own.pattern].clear()  # under a plan that is no measure for those to come
        return Verdict.LET_GO

    def note_left_above(self, planned: PlannedStep) -> None:
        """A step left ``planned``, and took more than it is worth.

        What a plan keeps is kept, so one of larger steps would be better, unless this one's come often.
        """
        pattern = planned.shapes[0].pattern
        if planned.kind is not None and not self.kinds.is_often(pattern, planned.kind):
            planned.kind = None
            self.kinds.wait_for_usual(pattern)

    def start_afresh(self) -> None:
        """Nothing is known any more of the ops of steps; which run online for good stays so."""
        self.alone.clear()
        self.kinds.clear()
        self._differed.clear()
        self._replans.clear()
