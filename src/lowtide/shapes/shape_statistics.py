"""What watched steps tell about shapes that nobody has watched: their graphs, and which of them are worth a plan.

Every recorded step goes into a family of its structure and its way to call the model. A model mostly has more than one:
a step that adds to gradients runs other ops than one that makes them. What one family confirms is enough, because a
plan is about forward ops.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.shapes.buckets import Expected, least_missed, next_bucket
from lowtide.shapes.call_shapes import CallShape
from lowtide.shapes.dimensions import Vector
from lowtide.shapes.shape_family import DerivedGraph
from lowtide.shapes.watched_family import ShapeExamples

_MOST_FAMILIES = 4  # a model that runs other ops at every length has no use for more


class ShapeStatistics:
    """One model's families, and how often each shape came."""

    def __init__(self) -> None:
        self._families: list[ShapeExamples] = []
        self._counts: dict[str, Counter[Vector]] = defaultdict(Counter)  # by the pattern of the first call
        # What follows from the examples so far, asked again at every step:
        self._plain_bytes: dict[CallShape, tuple[int, int] | None] = {}
        self._known: dict[CallShape, bool] = {}

    def saw(self, shape: CallShape) -> None:
        """A step begins with a call of ``shape``."""
        self._counts[shape.pattern][shape.sizes] += 1

    def note(self, shapes: tuple[CallShape, ...], graph: StepGraph, costs: Costs) -> str:
        """Take a watched step. Returns what was derived otherwise, in words; "" if nothing was."""
        first = shapes[0].sizes
        own = next((family for family in self._families if family.takes(shapes, graph)), None)
        reason = ""
        for family in self._of(shapes[0]):
            found = family.derive(first) if family.is_called_as(shapes) else None
            if found is None:
                continue
            derived = found[1]
            if difference := derived.check(graph) if family is own else _other_ops(derived.graph, graph):
                family.mistaken(first)
                reason = difference
        if own is None:
            own = ShapeExamples(shapes, graph)
            self._families = [*self._families[1 - _MOST_FAMILIES :], own]
        own.add(shapes, graph, costs)
        self._forget_answers()
        return reason

    def forget(self, like: CallShape) -> None:
        """The model has changed: what was watched of steps that are called like this one is worth nothing."""
        self._families = [family for family in self._families if family.patterns[0] != like.pattern]
        self._forget_answers()

    def change_graphs(self, changed: Callable[[StepGraph], StepGraph]) -> None:
        """Watched steps are of ``changed`` graphs, whose structure is the same."""
        for family in self._families:
            family.change_graphs(changed)
        self._forget_answers()

    def _forget_answers(self) -> None:
        self._plain_bytes.clear()
        self._known.clear()

    # -- one shape ------------------------------------------------------------------------------------------

    def knows(self, shape: CallShape) -> bool:
        """Whether ``derive`` gives a graph."""
        if shape not in self._known:
            self._known[shape] = any(family.knows(shape.sizes) for family in self._of(shape))
        return self._known[shape]

    def wants(self, shape: CallShape) -> bool:
        """Whether a step of ``shape`` that is watched anyway would tell something new, or should be compared."""
        families = self._of(shape)
        if any(family.stopped for family in families):
            return False
        return not any(family.knows(shape.sizes) and family.spans(shape.sizes) for family in families)

    def derive(self, shape: CallShape) -> tuple[tuple[CallShape, ...], DerivedGraph] | None:
        """The shapes of all calls of a step that begins with ``shape``, and its graph; None where none is confirmed."""
        for family in self._of(shape):
            if found := family.derive(shape.sizes):
                return found
        return None

    def plain_bytes(self, shape: CallShape) -> tuple[int, int] | None:
        """Plain peak and resident bytes; None where no graph is confirmed."""
        if shape not in self._plain_bytes:
            found = (family.plain_bytes(shape.sizes) for family in self._of(shape))
            self._plain_bytes[shape] = next((known for known in found if known is not None), None)
        return self._plain_bytes[shape]

    def fits_plain(self, shape: CallShape, budget_bytes: int) -> bool:
        """Whether a step of ``shape`` is known to fit, and no larger than one that was watched."""
        known = self.plain_bytes(shape)
        is_smaller = any(family.has_larger(shape.sizes) for family in self._of(shape))
        return known is not None and known[0] <= budget_bytes and is_smaller

    def _of(self, shape: CallShape) -> list[ShapeExamples]:
        return [family for family in reversed(self._families) if family.patterns[0] == shape.pattern]

    # -- all shapes -----------------------------------------------------------------------------------------

    def next_shape(
        self, like: CallShape, tops: Sequence[Vector], budget_bytes: int, max_plans: int
    ) -> CallShape | None:
        """The shape that is most worth another plan, beside those for ``tops``; None where none is.

        Args:
            like: Any call of the pattern that all these shapes have.
        """
        found = next_bucket(self._expected(like, budget_bytes), tops, max_plans)
        return None if found is None else like._replace(sizes=found)

    def least_missed(self, new: CallShape, tops: Sequence[Vector], budget_bytes: int) -> int:
        """Which of ``tops`` may go beside a plan for ``new``: without it the least more is recomputed."""
        return least_missed(self._expected(new, budget_bytes), tops, [new.sizes])

    def _expected(self, like: CallShape, budget_bytes: int) -> Expected:
        counts = self._counts.get(like.pattern, Counter())
        return Expected(counts, lambda sizes: self.plain_bytes(like._replace(sizes=sizes)), budget_bytes)


def _other_ops(graph: StepGraph, other: StepGraph) -> str:
    """The first forward op of ``other`` that ``graph`` has not, in words; "" if they have the same."""
    expected, found = ([op.name for op in g.forward_ops] for g in (graph, other))
    for at, (a, b) in enumerate(zip(expected, found)):
        if a != b:
            return f"forward op {at} is {b}, not {a}"
    return "" if len(expected) == len(found) else f"{len(found)} forward ops, not {len(expected)}"
