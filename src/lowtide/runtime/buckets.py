"""Buckets: the few shapes to make plans for, so that batches of every length seen recompute little.

A plan serves every shape that its own shape covers, at the price of recomputing what a shorter batch has room to keep.
So lengths are cut into buckets, and each bucket is planned for its largest shape. Shapes that fit without a plan need
none.

What a plan costs is estimated, since solving for every shape would take minutes: a plan has to drop the share of its
shape's activation memory that is above the budget, and a batch served by it recomputes that share of its own.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import inf, prod

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.runtime.dimensions import Vector, covers, join
from lowtide.runtime.shape_family import ShapeFamily
from lowtide.simulation.simulator import simulate_actions

_MOST_SHAPES = 24  # that are told apart; of more, neighbours are taken together: each costs a simulation


@dataclass(frozen=True)
class Buckets:
    """Which shapes to plan for.

    Attributes:
        plain: Shapes that fit without a plan, and so does all that they cover; none of them covers another.
        planned: Shapes to plan for, by rising plain peak.
        unknown: Shapes seen that the family cannot derive yet.
        expected_share: Share of the activation memory of all seen batches that is recomputed, by the estimate; inf
            where ``max_plans`` plans cannot serve them all.
    """

    plain: tuple[Vector, ...]
    planned: tuple[Vector, ...]
    unknown: tuple[Vector, ...]
    expected_share: float

    def fits_plain(self, dimensions: Vector) -> bool:
        """Whether a batch of ``dimensions`` is known to need no plan."""
        return any(covers(shape, dimensions) for shape in self.plain)

    def serving(self, dimensions: Vector) -> Vector | None:
        """The shape whose plan serves ``dimensions`` with the least recompute; None if no plan covers it."""
        return next((shape for shape in self.planned if covers(shape, dimensions)), None)


def plan_buckets(family: ShapeFamily, dimensions_seen: Iterable[Vector], budget_bytes: int, max_plans: int) -> Buckets:
    """Choose at most ``max_plans`` shapes to plan for, so that the least recompute is expected.

    Args:
        dimensions_seen: Of each batch so far; how often a shape comes counts.
        budget_bytes: Absolute peak.

    Raises:
        ValueError: ``max_plans`` is not positive, or nothing was seen.
    """
    counts = Counter(dimensions_seen)
    if max_plans < 1:
        raise ValueError(f"max_plans={max_plans}: no shape could be planned for. Allow 1 or more.")
    if not counts:
        raise ValueError("dimensions_seen is empty: nothing says what to plan for. Pass the shapes of some batches.")
    memory = _PlainMemory(family, budget_bytes)
    fitting: list[Vector] = []
    unknown: list[Vector] = []
    tight: list[_Group] = []
    total_bytes = 0
    for shapes in _quantiles(sorted(counts, key=lambda shape: (prod(shape), shape))):
        if memory.of(join(shapes)) is None:
            unknown += (missing := [shape for shape in shapes if memory.of(shape) is None])
            shapes = [shape for shape in shapes if shape not in missing]
        elif not memory.fits(join(shapes)) and memory.fits(shapes[0]):  # the limit lies between them
            fitting += (small := [shape for shape in shapes if memory.fits(shape)])
            shapes = [shape for shape in shapes if shape not in small]
        if not shapes:
            continue
        top = join(shapes)
        group = _Group(top, memory.activation_bytes(top) * sum(counts[shape] for shape in shapes))
        total_bytes += group.bytes
        if memory.fits(top):
            fitting += shapes
        else:
            tight.append(group)
    recomputed_bytes, planned = _best_partition(tight, memory, max_plans)
    return Buckets(
        plain=tuple(sorted(s for s in fitting if not any(covers(other, s) and other != s for other in fitting))),
        planned=tuple(sorted(planned, key=memory.order)),
        unknown=tuple(sorted(unknown)),
        expected_share=recomputed_bytes / total_bytes if total_bytes else 0.0,
    )


@dataclass(frozen=True)
class _Group:
    """Neighbouring shapes that one plan will serve; ``bytes``: activation memory of all their batches together."""

    top: Vector
    bytes: int


class _PlainMemory:
    """Plain peaks of derived shapes, each simulated once."""

    def __init__(self, family: ShapeFamily, budget_bytes: int) -> None:
        self._family = family
        self._budget_bytes = budget_bytes
        self._known: dict[Vector, tuple[int, int] | None] = {}

    def of(self, shape: Vector) -> tuple[int, int] | None:
        """Plain peak and resident bytes; None where the family does not determine the graph."""
        if shape not in self._known:
            derived = self._family.derive(shape)
            self._known[shape] = None if derived is None else _plain_peak(derived.graph)
        return self._known[shape]

    def activation_bytes(self, shape: Vector) -> int:
        peak, resident = self.of(shape) or (0, 0)
        return peak - resident

    def fits(self, shape: Vector) -> bool:
        return self.share(shape) <= 0.0

    def share(self, shape: Vector) -> float:
        """Of its activation memory what a plan for ``shape`` has to drop; at most 0 if it fits; inf where unknown."""
        known = self.of(shape)
        if known is None:
            return inf
        peak, resident = known
        return (peak - self._budget_bytes) / max(peak - resident, 1)

    def order(self, shape: Vector) -> tuple[int, Vector]:
        known = self.of(shape)
        return (0 if known is None else known[0]), shape


def _plain_peak(graph: StepGraph) -> tuple[int, int]:
    no_time = Costs(op_ms=(0.0,) * len(graph.ops))
    return simulate_actions(graph, no_time, {}).peak_bytes, graph.resident_bytes


def _quantiles(shapes: list[Vector]) -> list[list[Vector]]:
    """At most ``_MOST_SHAPES`` groups of neighbours, about equally many shapes in each."""
    num_groups = min(len(shapes), _MOST_SHAPES)
    cuts = [len(shapes) * i // num_groups for i in range(num_groups + 1)]
    return [shapes[a:b] for a, b in pairwise(cuts)]


def _best_partition(groups: list[_Group], memory: _PlainMemory, max_plans: int) -> tuple[float, list[Vector]]:
    """The least recomputed bytes, and the shapes to plan for, of all cuts of ``groups`` into ``max_plans`` runs."""
    # best[end]: the same for the first ``end`` groups.
    best: list[tuple[float, list[Vector]]] = [(0.0, []), *((inf, []) for _ in groups)]
    for _ in range(max_plans):
        longer = list(best)
        for end in range(1, len(groups) + 1):
            for start in range(end):
                before, chosen = best[start]
                run = groups[start:end]
                top = join(group.top for group in run)
                recomputed = before + memory.share(top) * sum(group.bytes for group in run)
                if recomputed < longer[end][0]:
                    longer[end] = recomputed, [*chosen, top]
        best = longer
    return best[-1]
