"""Integers at other points from their values at a few: exact polynomials with as few terms as explain them.

A term is a product of dimensions, each to the power 0, 1 or 2: sizes of tensors are products of input sizes, and an
attention mask has the length twice. Coefficients are fractions, so nothing is rounded.

Several polynomials with the fewest terms may explain the same examples: lengths 1 and 2 cannot tell 3n + 1 from n² + 3.
Where they give different values, that of the lowest degree is taken, and is not confirmed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, product
from math import comb, prod

import numpy as np

from lowtide.shapes.dimensions import Vector

_MOST_POWER = 2
# Sizes have one to three terms, each of at most three dimensions.
_MOST_TERMS = {1: 3, 2: 4}
_MOST_TERMS_OTHERWISE = 3
_MOST_DIMENSIONS_OF_A_TERM = 3
# Of many dimensions (a list of images has two for each) so many sums exist that training would wait for minutes.
_MOST_TRIED = 4_000
_ROUNDING = 1e-6  # of the values: what floats leave of values that exact arithmetic may explain

Monomial = tuple[int, ...]  # the power of each dimension


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A sum of ``coefficients[i]`` times ``monomials[i]``."""

    monomials: tuple[Monomial, ...]
    coefficients: tuple[Fraction, ...]

    @property
    def degree(self) -> int:
        """Sum of all powers of all terms: what a simpler polynomial has less of."""
        return sum(map(sum, self.monomials))

    def at(self, point: Vector) -> Fraction:
        terms = zip(self.coefficients, self.monomials)
        return sum((c * value_of(monomial, point) for c, monomial in terms), start=Fraction(0))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value between the examples or beyond them.

    Attributes:
        value: The integer; of what was rounded to blocks (``block_rounding.py``) the most that it can be.
        least: The least that it can be; ``value`` where nothing was rounded.
        confirmed: More examples than terms, and every polynomial with so few terms gives this value.
    """

    value: int
    least: int
    confirmed: bool


class Interpolation:
    """Values at any point from values at ``points``.

    A dimension in which the points do not differ is unknown: ``unvaried`` names those.
    """

    def __init__(self, points: Sequence[Vector]) -> None:
        self.points = tuple(points)
        columns = list(zip(*points, strict=True))
        self._varied = [at for at, column in enumerate(columns) if len(set(column)) > 1]
        self.unvaried = {at: column[0] for at, column in enumerate(columns) if len(set(column)) == 1}
        self.monomials = _monomials(len(self._varied))
        self._most_terms = min(_MOST_TERMS.get(len(self._varied), _MOST_TERMS_OTHERWISE), len(self.points))
        self._reduced = [self.reduced(point) for point in self.points]
        self._explanations: dict[tuple[int, ...], list[Polynomial]] = {}
        self._spans: dict[int, tuple[list[tuple[Monomial, ...]], np.ndarray]] = {}

    def reduced(self, point: Vector) -> Vector:
        """``point`` without the dimensions that never varied: what monomials are about."""
        return tuple(point[at] for at in self._varied)

    def estimate(self, values: Sequence[int], point: Vector) -> Estimate | None:
        """The value at ``point`` of what had ``values`` at the examples, in their order.

        ``point`` has the examples' value in every unvaried dimension.

        Returns:
            None where no polynomial explains the values, or where equally simple ones give different integers.
        """
        if len(set(values)) == 1:
            return Estimate(values[0], values[0], confirmed=len(values) > 1)
        reduced = self.reduced(point)
        explanations = self.explanations(values)
        # A size is an integer: what gives a fraction is no explanation.
        found = [(p.degree, value) for p in explanations if (value := p.at(reduced)).denominator == 1]
        if not found:
            return None
        spare = len(self.points) > len(explanations[0].monomials)
        if len({value for _, value in found}) == 1:
            only = int(found[0][1])
            return Estimate(only, only, confirmed=spare)
        lowest = min(degree for degree, _ in found)
        simplest = {int(value) for degree, value in found if degree == lowest}
        return Estimate(max(simplest), max(simplest), confirmed=False) if len(simplest) == 1 else None

    def explanations(self, values: Sequence[int]) -> list[Polynomial]:
        """Every polynomial with the fewest terms that has ``values`` at the examples."""
        key = tuple(values)
        if key not in self._explanations:
            self._explanations[key] = self._explain(key)
        return self._explanations[key]

    def _explain(self, values: tuple[int, ...]) -> list[Polynomial]:
        if not any(values):
            return [Polynomial((), ())]
        for num_terms in range(1, self._most_terms + 1):
            if found := list(self._with_terms(num_terms, values)):
                return found
        return []

    def _with_terms(self, num_terms: int, values: tuple[int, ...]) -> Iterator[Polynomial]:
        for monomials in self.may_explain(num_terms, values):
            rows = [[value_of(m, point) for m in monomials] for point in self._reduced]
            solution = solve_exactly(rows, values)
            if solution is not None:
                yield Polynomial(monomials, solution)

    def may_explain(
        self, num_terms: int, values: tuple[int, ...], within: float = 0.0
    ) -> Iterator[tuple[Monomial, ...]]:
        """Sums of so many terms that floats do not rule out; ``within``: how far from each value a sum may be."""
        sums, bases = self._sums_of(num_terms)
        wanted = np.array(values, dtype=np.float64)
        rest = wanted - (bases @ (bases.transpose(0, 2, 1) @ wanted)[..., None])[..., 0]
        least = within * len(values) ** 0.5 + _ROUNDING * np.linalg.norm(wanted)
        for at in np.flatnonzero(np.linalg.norm(rest, axis=1) <= least):
            yield sums[at]

    def _sums_of(self, num_terms: int) -> tuple[list[tuple[Monomial, ...]], np.ndarray]:
        """All sums of so many terms (none where they are too many), and a basis of each one's columns."""
        if num_terms not in self._spans:
            few = comb(len(self.monomials), num_terms) <= _MOST_TRIED
            sums = list(combinations(self.monomials, num_terms)) if few else []
            column_of = {m: np.array([value_of(m, p) for p in self._reduced], dtype=np.float64) for m in self.monomials}
            units = {m: column / max(float(np.linalg.norm(column)), 1.0) for m, column in column_of.items()}
            columns = np.array([[units[m] for m in s] for s in sums]).reshape(len(sums), num_terms, len(self.points))
            self._spans[num_terms] = sums, np.linalg.qr(columns.transpose(0, 2, 1))[0]
        return self._spans[num_terms]


def _monomials(num_dimensions: int) -> list[Monomial]:
    found = set()
    for chosen in combinations(range(num_dimensions), min(num_dimensions, _MOST_DIMENSIONS_OF_A_TERM)):
        for powers in product(range(_MOST_POWER + 1), repeat=len(chosen)):
            monomial = [0] * num_dimensions
            for at, power in zip(chosen, powers):
                monomial[at] = power
            found.add(tuple(monomial))
    return sorted(found)


def value_of(monomial: Monomial, point: Vector) -> int:
    return prod(size**power for size, power in zip(point, monomial, strict=True))


def solve_exactly(rows: Sequence[Sequence[int]], values: Sequence[int]) -> tuple[Fraction, ...] | None:
    """The one solution of the equations ``rows`` · x = ``values``; None where there is none, or more than one."""
    width = len(rows[0])
    left = [[*map(Fraction, row), Fraction(value)] for row, value in zip(rows, values, strict=True)]
    for column in range(width):
        pivot = next((at for at in range(column, len(left)) if left[at][column]), None)
        if pivot is None:
            return None
        left[column], left[pivot] = left[pivot], left[column]
        head = left[column] = [entry / left[column][column] for entry in left[column]]
        for at, row in enumerate(left):
            if at != column and (factor := row[column]):
                left[at] = [a - factor * b for a, b in zip(row, head)]
    if any(row[width] for row in left[width:]):
        return None
    return tuple(row[width] for row in left[:width])
