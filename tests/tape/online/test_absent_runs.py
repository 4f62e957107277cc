"""Prices of what is absent: one sum for each run."""

import random
from types import SimpleNamespace
from typing import Any

from lowtide.tape.online.absent_runs import AbsentRuns


def value(cost_s: float, inputs: tuple = (), *, present: bool = False) -> Any:
    return SimpleNamespace(cost_s=cost_s, inputs=inputs, is_present=present, recipe=object())


def chain(costs: list[float], present: set[int]) -> list[Any]:
    made: list[Any] = []
    for number, cost_s in enumerate(costs):
        made.append(value(cost_s, tuple(made[-1:]), present=number in present))
    return made


def test_in_a_chain_the_price_is_that_of_what_is_absent_before():
    values = chain([1.0, 2.0, 4.0, 8.0, 16.0], present={1, 4})
    runs = AbsentRuns()

    assert [runs.seconds_to_make(v) for v in values] == [1.0, 3.0, 4.0, 12.0, 28.0]


def test_runs_that_are_one_have_one_sum_in_whatever_order_they_are_asked_for():
    root = value(1.0)
    left, right = value(2.0, (root,)), value(4.0, (root,))
    top = value(8.0, (left, right))
    for order in ([top, left, right], [left, right, top], [right, top, left]):
        runs = AbsentRuns()
        found = {id(v): runs.seconds_to_make(v) for v in order}
        assert found[id(top)] == 15.0


def test_each_absent_value_is_looked_at_once():
    looked: list[int] = []

    class Counted(SimpleNamespace):
        @property
        def inputs(self) -> tuple:
            looked.append(self.number)
            return self.reads

    values: list[Any] = []
    for number in range(2000):
        present = random.Random(number).random() < 0.1
        reads = tuple(values[-1:])
        values.append(Counted(number=number, cost_s=1.0, reads=reads, is_present=present, recipe=object()))
    runs = AbsentRuns()
    for v in values:
        runs.seconds_to_make(v)

    assert len(looked) <= 2 * len(values)
