"""Integers at other points: exact where the examples determine them, and never silently guessed."""

import random
import time
from fractions import Fraction
from itertools import combinations, product

from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples

from lowtide.shapes.interpolation import Interpolation, solve_exactly, value_of


def values(function, points):
    return [function(*point) for point in points]


LENGTHS = [(48,), (64,), (96,)]


def test_a_quadratic_through_three_lengths_is_only_consistent():
    found = Interpolation(LENGTHS).estimate(values(lambda n: 3 * n * n + 5 * n + 7, LENGTHS), (160,))

    assert (found.value, found.confirmed) == (3 * 160**2 + 5 * 160 + 7, False)


def test_two_terms_through_three_lengths_are_confirmed():
    for function in (lambda n: 3 * n + 7, lambda n: n * n + n, lambda n: 4 * n):
        found = Interpolation(LENGTHS).estimate(values(function, LENGTHS), (160,))
        assert (found.value, found.confirmed) == (function(160), True)


def test_of_two_lengths_the_lowest_degree_is_taken_and_not_confirmed():
    found = Interpolation(LENGTHS[:2]).estimate(values(lambda n: 3 * n + 7, LENGTHS[:2]), (160,))

    assert (found.value, found.confirmed) == (3 * 160 + 7, False)


def test_half_a_byte_is_no_size():
    # n (n - 1) / 2 is an integer everywhere; (n² + 2n) / 3 is not.
    points = [(3,), (6,), (9,)]
    triangle = Interpolation(LENGTHS).estimate(values(lambda n: n * (n - 1) // 2, LENGTHS), (161,))

    assert triangle.value == 161 * 80
    assert Interpolation(points).estimate(values(lambda n: (n * n + 2 * n) // 3, points), (11,)) is None


def test_batch_and_length_are_told_apart_by_four_shapes():
    points = [(2, 32), (2, 64), (3, 32), (3, 64)]
    made = Interpolation(points)

    for function in (lambda b, n: 4 * b * n, lambda b, n: 4 * b * (n - 1), lambda b, n: 12 * n, lambda b, n: 8 * b):
        assert made.estimate(values(function, points), (5, 700)).value == function(5, 700)


def test_dimensions_that_vary_together_leave_the_value_open():
    points = [(2, 32), (4, 64), (8, 128)]
    made = Interpolation(points)
    size = values(lambda b, n: 4 * b * n, points)

    assert made.estimate(size, (16, 256)).value == 4 * 16 * 256  # the same whichever way it is explained
    assert made.estimate(size, (2, 256)) is None


def test_an_unvaried_dimension_is_named():
    made = Interpolation([(2, 32), (2, 64)])

    assert made.unvaried == {0: 2}
    assert made.reduced((2, 96)) == (96,)


def test_no_polynomial_no_value():
    points = [(n,) for n in (8, 9, 10, 15, 16, 17, 24)]

    assert Interpolation(points).estimate(values(lambda n: -(-n // 8) * 8, points), (40,)) is None


def test_equations_without_one_solution_have_none():
    assert solve_exactly([[1, 2], [2, 4]], [3, 6]) is None
    assert solve_exactly([[1], [1]], [3, 4]) is None
    assert solve_exactly([[2, 0], [0, 3], [2, 3]], [1, 1, 2]) == (Fraction(1, 2), Fraction(1, 3))


coefficients = st.dictionaries(st.integers(0, 2), st.integers(1, 10**9), min_size=1, max_size=3)


@given(coefficients, st.lists(st.integers(1, 5000), min_size=4, max_size=5, unique=True), st.integers(1, 10**5))
def test_any_polynomial_of_a_length_is_confirmed_by_four_examples(terms, lengths, asked):
    def size(n):
        return sum(c * n**power for power, c in terms.items())

    found = Interpolation([(n,) for n in lengths]).estimate([size(n) for n in lengths], (asked,))

    assert (found.value, found.confirmed) == (size(asked), True)


grids = st.tuples(
    st.lists(st.integers(1, 9), min_size=3, max_size=3, unique=True),
    st.lists(st.integers(1, 900), min_size=3, max_size=3, unique=True),
)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 2)), st.integers(1, 10**6), min_size=1, max_size=3),
    grids,
    st.tuples(st.integers(1, 9), st.integers(1, 900)),
)
def test_a_grid_of_three_by_three_shapes_confirms_any_size_of_three_terms(terms, grid, asked):
    def size(point):
        return sum(c * point[0] ** i * point[1] ** j for (i, j), c in terms.items())

    points = list(product(*grid))
    found = Interpolation(points).estimate([size(p) for p in points], asked)

    assert (found.value, found.confirmed) == (size(asked), True)


def test_floats_rule_out_nothing_that_exact_arithmetic_explains():
    numbers = random.Random(0)
    sizes = [1, 2, 3, 4, 7, 16, 48, 96, 512, 4096]
    for _ in range(examples(100)):
        num_dimensions = numbers.randint(1, 3)
        points = list({tuple(numbers.choice(sizes) for _ in range(num_dimensions)) for _ in range(5)})
        known = Interpolation(points)
        chosen = numbers.sample(known.monomials, min(len(known.monomials), 2))
        found = [sum(3 * value_of(m, known.reduced(p)) for m in chosen) for p in points]
        exact = [
            sums
            for sums in combinations(known.monomials, min(2, len(points)))
            if solve_exactly([[value_of(m, known.reduced(p)) for m in sums] for p in points], found)
        ]

        assert set(exact) <= set(known.may_explain(min(2, len(points)), tuple(found)))


def test_eight_dimensions_are_answered_at_once():
    # A list of four images has two sizes for each. All sums of three of their 6,561 products would take hours.
    numbers = random.Random(0)
    points = [tuple(numbers.randint(24, 80) for _ in range(8)) for _ in range(6)]
    known = Interpolation(points)
    at = tuple(range(30, 38))
    began = time.process_time()

    found = known.estimate([16 * p[0] * p[1] for p in points], at)
    unknown = known.estimate([p[0] * p[1] + p[2] * p[3] + p[4] * p[5] for p in points], at)

    assert (found.value, found.confirmed, unknown) == (16 * 30 * 31, True, None)
    assert time.process_time() - began < 2
