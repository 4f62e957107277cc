"""Buckets: the few shapes to make plans for, so that batches of every length seen recompute little.

A plan serves every shape that its own shape covers, at the price of recomputing what a shorter batch has room to keep.
So lengths fall into buckets, and each bucket is planned for its largest shape. The lengths become known only during
training, so plans are made one at a time, each for the shape whose plan is expected to save most recomputation.
Beyond ``max_plans``, the plan goes whose removal adds the least recomputation.

What a plan costs is estimated, since solving for every shape would take minutes: a plan has to drop the share of its
shape's activation memory that is above the budget, and a batch served by it recomputes that share of its own. A plan
whose shape fits the budget drops nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from lowtide.shapes.dimensions import Vector, covers, join

_MOST_TOPS = 24  # that are looked at; of more shapes, each of so many groups has one
_LEAST_GAIN = 0.01  # of the activation memory of all batches seen: less is not worth a plan

_ONLINE_SHARE = 4.0  # a step without a plan: as if it were recomputed several times

PlainBytes = Callable[[Vector], tuple[int, int] | None]  # plain peak and resident bytes; None where unknown


@dataclass(frozen=True)
class Expected:
    """What the batches seen so far recompute, by the estimate.

    Args:
        counts: How often each shape came.
        plain_bytes: Of any shape. Shapes that it does not know do not count.
    """

    counts: Mapping[Vector, int]
    plain_bytes: PlainBytes
    budget_bytes: int

    def share(self, shape: Vector) -> float:
        """Of the activation memory of a batch that a plan for ``shape`` serves, what it recomputes; inf if unknown."""
        known = self.plain_bytes(shape)
        if known is None:
            return inf
        peak, resident = known
        return max(0.0, (peak - self.budget_bytes) / max(peak - resident, 1))

    @cached_property
    def weights(self) -> dict[Vector, int]:
        """Activation bytes of all batches of each known shape, the shapes in order of their plain peaks."""
        known = [(found, shape) for shape in self.counts if (found := self.plain_bytes(shape)) is not None]
        return {shape: (peak - resident) * self.counts[shape] for (peak, resident), shape in sorted(known)}

    def served(self, tops: Sequence[Vector]) -> dict[Vector, float]:
        """The share that each known shape recomputes under the best of the plans for ``tops``."""
        shares = [(min(self.share(top), _ONLINE_SHARE), top) for top in tops]
        return {
            shape: min((s for s, top in shares if covers(top, shape)), default=_ONLINE_SHARE) for shape in self.weights
        }

    def recomputed_bytes(self, tops: Sequence[Vector]) -> float:
        return sum(self.weights[shape] * share for shape, share in self.served(tops).items())


def least_missed(expected: Expected, tops: Sequence[Vector], new: Sequence[Vector] = ()) -> int:
    """Which of ``tops`` may go: without it the least more is recomputed beside ``new``. Of equal ones the first."""
    costs = [expected.recomputed_bytes([*tops[:at], *tops[at + 1 :], *new]) for at in range(len(tops))]
    return costs.index(min(costs))


def next_bucket(expected: Expected, tops: Sequence[Vector], max_plans: int) -> Vector | None:
    """The shape that is most worth another plan; None where none is worth it.

    Args:
        tops: Those that are planned for. Where they are ``max_plans``, one of them goes.

    Raises:
        ValueError: ``max_plans`` is not positive.
    """
    if max_plans < 1:
        raise ValueError(f"max_plans={max_plans}: no shape could be planned for. Allow 1 or more.")
    weights = expected.weights
    now = expected.recomputed_bytes(tops)
    kept = list(tops)
    while len(kept) >= max_plans:
        del kept[least_missed(expected, kept)]
    served = expected.served(kept)
    best, most = None, _LEAST_GAIN * sum(weights.values())
    for top in _tops(list(weights)):
        share = expected.share(top)
        with_it = sum(
            weight * (min(share, served[shape]) if covers(top, shape) else served[shape])
            for shape, weight in weights.items()
        )
        if top not in tops and now - with_it > most:
            best, most = top, now - with_it
    return best


def _tops(shapes: list[Vector]) -> list[Vector]:
    """Shapes that cover all before them, for about equally many of ``shapes`` each."""
    num = min(len(shapes), _MOST_TOPS)
    ends = [len(shapes) * (n + 1) // num for n in range(num)]
    found: list[Vector] = []
    for start, end in zip([0, *ends], ends):
        found.append(join([*found[-1:], *shapes[start:end]]))
    return list(dict.fromkeys(found))
