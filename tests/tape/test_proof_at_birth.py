"""An op runs twice: which result counts, which bits are compared, and whether both results are there at a time."""

from itertools import count
from types import SimpleNamespace

import pytest
import torch

from lowtide.tape.proof_at_birth import run_twice


def op_of(kernel, name="aten.sin.default"):
    return SimpleNamespace(name=name, func=torch.ops.aten.sin.default, kernel=kernel, drops=((0, 32),))


def other_each_time():
    runs = count()
    return lambda x: x + next(runs)


@pytest.mark.parametrize(
    ("name", "counts", "held_both"), [("aten.sin.default", 1, False), ("others.sin.default", 0, True)]
)
def test_of_an_op_that_differs_the_first_result_counts_where_it_may_keep_something(name, counts, held_both):
    found = run_twice(op_of(other_each_time(), name), (torch.zeros(8),), {}, None)

    assert not found.is_same
    assert found.held_both is held_both
    assert found.result.tolist() == [counts] * 8


def test_rows_that_change_places_are_other_bits():
    turns = count()
    found = run_twice(op_of(lambda x: x.roll(next(turns))), (torch.arange(8.0),), {}, None)

    assert not found.is_same and not found.held_both


def test_what_lies_between_the_elements_of_a_result_is_not_compared():
    runs = count(1)

    def with_gaps(x):
        memory = torch.full((16,), float(next(runs)))
        memory[::2] = x
        return memory[::2]

    found = run_twice(op_of(with_gaps), (torch.ones(8),), {}, None)

    assert found.is_same and found.held_both
