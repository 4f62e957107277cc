"""One size of a derived graph where the examples' sizes were rounded up to blocks: the least and the most it can be.

``shape_family.py`` asks for it on an accelerator, whose allocator gives blocks of 512 bytes: a graph has the bytes of
the blocks, not the bytes asked for. These were more than the value less one block, and at most the value. A polynomial
explains the examples if it lies in each example's range. The coefficients of all such polynomials form a polytope, and
at two of its corners the polynomial takes its least and its largest value at the new point.

A polynomial of one term mostly has an integer coefficient, such as bytes per token. With examples of a few hundred
tokens only one integer fits all ranges, so the least and the most are the same.
"""

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, product
from math import ceil, floor

from lowtide.shapes.dimensions import Vector
from lowtide.shapes.interpolation import Estimate, Interpolation, Monomial, Polynomial, solve_exactly, value_of

_MOST_TERMS = 2  # of more, the corners are many and the ranges wide


def estimate_in_blocks(
    interpolation: Interpolation, values: tuple[int, ...], point: Vector, block_bytes: int
) -> Estimate | None:
    """The size at ``point`` of what has ``values``, multiples of ``block_bytes``, at the examples.

    Returns:
        The most that any polynomial with the fewest terms gives, with the least that one gives; in whole blocks. None
        where no polynomial of few terms goes through the ranges.
    """
    points = [interpolation.reduced(p) for p in interpolation.points]
    target = interpolation.reduced(point)
    ranges = [(max(value - block_bytes + 1, 0), value) for value in values]
    if not any(values):
        return Estimate(0, 0, confirmed=len(values) > 1)
    for num_terms in range(1, min(_MOST_TERMS, len(points)) + 1):
        found: list[Fraction] = []
        for monomials in interpolation.may_explain(num_terms, values, within=block_bytes):
            corners = _corners(monomials, points, ranges)
            found += [Polynomial(monomials, corner).at(target) for corner in corners]
        if found:
            least, most = (max(ceil(value / block_bytes), 0) * block_bytes for value in (min(found), max(found)))
            return Estimate(most, least, confirmed=num_terms < len(points))
    return None


def _corners(
    monomials: tuple[Monomial, ...], points: list[Vector], ranges: list[tuple[int, int]]
) -> Iterator[tuple[Fraction, ...]]:
    """The corners of the polytope of coefficients that keep the polynomial inside all ``ranges``."""
    rows = [[value_of(m, point) for m in monomials] for point in points]
    if len(monomials) == 1:
        if any(not row[0] and low for row, (low, _) in zip(rows, ranges)):
            return  # of an empty batch this term is nothing, and there is something
        positive = [(row[0], *bounds) for row, bounds in zip(rows, ranges) if row[0]]
        lowest = max(Fraction(low, at) for at, low, _ in positive)
        highest = min(Fraction(high, at) for at, _, high in positive)
        if lowest <= highest:
            whole = (Fraction(ceil(lowest)), Fraction(floor(highest)))
            yield from zip(whole if whole[0] <= whole[1] else (lowest, highest))
        return
    for chosen in combinations(range(len(points)), len(monomials)):
        for ends in product((0, 1), repeat=len(monomials)):
            bounds = [ranges[at][end] for at, end in zip(chosen, ends)]
            corner = solve_exactly([rows[at] for at in chosen], bounds)
            if corner is None:
                break
            sizes = [sum(c * entry for c, entry in zip(corner, row)) for row in rows]
            if all(low <= size <= high for size, (low, high) in zip(sizes, ranges)):
                yield corner
