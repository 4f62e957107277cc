"""Watched steps of one structure and one way to call the model, and which of them tell about a shape.

Not every example suits every question. Kernels choose workspaces by thresholds, so a very short batch spoils the
polynomials of all others. So where all examples together confirm nothing, those nearest to the shape are asked.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.graph.structure import structure_hash
from lowtide.shapes.call_shapes import CallShape
from lowtide.shapes.dimensions import Dimensions, Vector, covers, varying_dimensions
from lowtide.shapes.shape_family import DerivedGraph, ShapeFamily, distance

_MOST_EXAMPLES = 6
_FEWEST_TO_CONFIRM = 3  # that confirm sizes of two terms


@dataclass(frozen=True)
class _Example:
    sizes: Vector  # of all calls' tensors
    graph: StepGraph
    costs: Costs


class ShapeExamples:
    """Derives graphs while they turn out right.

    Attributes:
        patterns: Of the step's calls.
        stopped: A graph between the examples turned out wrong: nothing is derived any more.
    """

    def __init__(self, shapes: tuple[CallShape, ...], graph: StepGraph) -> None:
        self.patterns = tuple(shape.pattern for shape in shapes)
        self.stopped = False
        self._sizes_of_calls = [len(shape.sizes) for shape in shapes]
        self._num_sizes = self._sizes_of_calls[0]  # what is known when a step begins
        self._structure = structure_hash(graph)
        self._examples: list[_Example] = []
        self._dimensions: Dimensions | None = None
        self._extrapolates = True
        self._parts: dict[tuple[int, ...], ShapeFamily] = {}  # by the examples that they hold

    def takes(self, shapes: tuple[CallShape, ...], graph: StepGraph) -> bool:
        """Whether a step whose calls have these shapes is one of these."""
        return self.is_called_as(shapes) and structure_hash(graph) == self._structure

    def is_called_as(self, shapes: tuple[CallShape, ...]) -> bool:
        return tuple(shape.pattern for shape in shapes) == self.patterns

    def add(self, shapes: tuple[CallShape, ...], graph: StepGraph, costs: Costs) -> None:
        """Take a watched step as an example, if it tells anything new."""
        first, sizes = shapes[0].sizes, tuple(size for shape in shapes for size in shape.sizes)
        known = any(e.sizes == sizes for e in self._examples)
        if known or self.stopped or len(self._examples) == _MOST_EXAMPLES or (self.knows(first) and self.spans(first)):
            return
        self._examples.append(_Example(sizes, graph, costs))
        before, self._dimensions = self._dimensions, varying_dimensions([[e.sizes] for e in self._examples])
        if before is None or before.groups != self._dimensions.groups:
            self._parts.clear()

    def change_graphs(self, changed: Callable[[StepGraph], StepGraph]) -> None:
        """The examples are of ``changed`` graphs, whose structure is the same."""
        self._examples = [replace(e, graph=changed(e.graph)) for e in self._examples]
        self._parts.clear()

    def mistaken(self, first: Vector) -> None:
        """A graph derived for ``first`` was wrong: beyond the examples nothing is derived any more, or nothing."""
        if self.spans(first):
            self.stopped = True
        self._extrapolates = False

    # -- what follows from the examples ---------------------------------------------------------------------

    def knows(self, first: Vector) -> bool:
        """Whether the graph of a step whose first call has these sizes follows, and is confirmed."""
        return self._part(first) is not None

    def derive(self, first: Vector) -> tuple[tuple[CallShape, ...], DerivedGraph] | None:
        """The shapes of all calls, and the step's graph; None where it does not follow or is not confirmed."""
        found = self._part(first)
        if found is None:
            return None
        part, sizes, vector = found
        derived = part.derive(vector)
        ends = list(accumulate(self._sizes_of_calls))
        calls = zip(self.patterns, [0, *ends], ends)
        shapes = tuple(CallShape(pattern, sizes[start:end]) for pattern, start, end in calls)
        return None if derived is None else (shapes, derived)

    def plain_bytes(self, first: Vector) -> tuple[int, int] | None:
        """Plain peak and resident bytes; None where ``derive`` gives None."""
        found = self._part(first)
        return None if found is None else found[0].plain_bytes(found[2])

    def spans(self, first: Vector) -> bool:
        """Whether every size lies between those of the examples."""
        columns = list(zip(*(e.sizes[: self._num_sizes] for e in self._examples)))
        return bool(columns) and all(min(seen) <= size <= max(seen) for size, seen in zip(first, columns, strict=True))

    def has_larger(self, first: Vector) -> bool:
        """Whether an example covers it."""
        return any(covers(e.sizes[: self._num_sizes], first) for e in self._examples)

    def _part(self, first: Vector) -> tuple[ShapeFamily, Vector, Vector] | None:
        """Examples that confirm the graph, sizes of all calls, and the dimension vector."""
        sizes = self._of_all_calls(first)
        if self.stopped or sizes is None or not (self._extrapolates or self.spans(first)):
            return None
        assert self._dimensions is not None
        vector = self._dimensions.of([sizes])
        for chosen in self._choices(vector):
            if chosen not in self._parts:
                self._parts[chosen] = self._family_of(chosen)
            if self._parts[chosen].confirms(vector):
                return self._parts[chosen], sizes, vector
        return None

    def _of_all_calls(self, first: Vector) -> Vector | None:
        """Sizes of later calls are those that were always equal to one of the first call's, or never moved."""
        dimensions = self._dimensions
        if dimensions is None or len(first) != self._num_sizes:
            return None
        found = dict(dimensions.constants) | dict(enumerate(first))
        for group in dimensions.groups:
            if group[0] >= self._num_sizes:
                return None
            found |= {position: first[group[0]] for position in group if position >= self._num_sizes}
        sizes = tuple(found[position] for position in range(len(found)))
        return None if dimensions.why_not([sizes]) else sizes

    def _family_of(self, chosen: tuple[int, ...]) -> ShapeFamily:
        assert self._dimensions is not None
        family = ShapeFamily()
        for at in chosen:
            example = self._examples[at]
            family.add(self._dimensions.of([example.sizes]), example.graph, example.costs)
        return family

    def _choices(self, vector: Vector) -> Iterator[tuple[int, ...]]:
        assert self._dimensions is not None
        vectors = [self._dimensions.of([e.sizes]) for e in self._examples]
        yield tuple(range(len(vectors)))
        near = sorted(range(len(vectors)), key=lambda n: distance(vectors[n], vector))
        for num in range(len(vectors) - 1, _FEWEST_TO_CONFIRM - 1, -1):
            yield tuple(sorted(near[:num]))
