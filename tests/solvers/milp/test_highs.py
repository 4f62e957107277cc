"""Programs that are solved again with other costs and limits."""

import math

import numpy as np
import pytest

from lowtide.solvers.milp.highs import LinearProgram, RepeatedRelaxation


def program(costs, upper):
    """Cover 2.5 of the columns, with at most ``upper`` of the first two."""
    made = LinearProgram()
    columns = [made.column(cost, integer=True) for cost in costs]
    made.row(dict.fromkeys(columns, 1.0), lower=2.5)
    made.row(dict.fromkeys(columns[:2], 1.0), upper=upper)
    return made


def test_a_repeated_relaxation_is_that_of_the_changed_program():
    changing = program([1.0, 2.0, 3.0, 4.0], math.inf)
    repeated = RepeatedRelaxation(changing)

    for costs, upper in (([1.0, 2.0, 3.0, 4.0], math.inf), ([4.0, 3.0, 2.0, 1.0], 1.0), ([1.0, 1.5, 9.0, 8.0], 0.5)):
        changing.cost[:] = costs
        changing.row_upper[1] = upper

        np.testing.assert_allclose(repeated.values(changing), program(costs, upper).relax().values, atol=1e-9)


def test_a_repeated_relaxation_without_a_solution_has_no_values_and_finds_them_again():
    changing = program([1.0, 2.0, 3.0], math.inf)
    repeated = RepeatedRelaxation(changing)
    changing.row_upper[1] = -1.0

    assert not len(repeated.values(changing))

    changing.row_upper[1] = math.inf
    np.testing.assert_allclose(repeated.values(changing), [1.0, 1.0, 0.5], atol=1e-9)


def test_rows_of_a_copy_are_not_rows_of_the_program():
    original = program([1.0, 2.0, 3.0], math.inf)
    other = original.copy()
    other.row({0: 1.0}, upper=0.0)
    other.row_upper[1] = 0.5

    assert original.relax().objective == pytest.approx(4.5)
    assert not math.isfinite(other.relax().objective)


def test_nothing_above_the_cutoff_is_a_proof():
    made = program([1.0, 1.1, 1.2], math.inf)
    made.row({0: 1.0, 1: 1.1, 2: 1.2}, upper=3.2)

    answer = made.minimise(gap=0.0, slack=0.0, node_limit=100, time_limit_s=math.inf, first=True, cutoff=3.2)

    assert answer.status == "infeasible"  # the best whole solution takes all three: 3.3
