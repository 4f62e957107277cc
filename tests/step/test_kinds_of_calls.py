"""Which calls prove one another, and how many of them are remembered."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lowtide.step import kinds_of_calls
from lowtide.step.kinds_of_calls import MOST_VALUES, Kind, KnownKinds, is_immutable, layout_of, values_of


def kind(*given: Any) -> Kind:
    return Kind((layout_of(given),), values_of(given))


@pytest.mark.parametrize(
    ("a", "b"),
    [(1, 2), (1, True), (1, 1.0), (0.0, -0.0), (0.5, 0.25), ("fast", "slow"), (None, 0), (b"a", "a"), ((1, 2), (2, 1)),
     (torch.float16, torch.bfloat16), ({"p": 0.1}, {"p": 0.2}), (len, max), (math.inf, math.nan)],
)  # fmt: skip
def test_calls_with_other_values_are_other_kinds(a, b):
    assert kind(a) != kind(b)
    assert kind(a) == kind(a) and hash(kind(a)) == hash(kind(a))


def test_what_is_in_a_tensor_belongs_to_no_kind():
    assert kind(torch.ones(3)) == kind(torch.zeros(3))
    assert kind(torch.ones(3)) != kind(torch.ones(4))


def test_not_a_number_is_itself():
    assert kind(math.nan) == kind(float("nan"))


def test_lambdas_of_one_line_are_of_one_kind():
    def makes(value: float) -> Any:
        return lambda x, scale=value: x * scale

    assert kind(makes(2.0)) == kind(makes(2.0))
    assert kind(makes(2.0)) != kind(makes(3.0))


def test_the_latest_values_of_a_place_are_remembered():
    known = KnownKinds()
    for number in range(MOST_VALUES):
        known.learn(kind(number), "")
    assert not known.is_never_the_same(kind(0))
    assert kind(0) in known  # so it is the latest
    known.learn(kind(MOST_VALUES), "")

    assert kind(0) in known and kind(1) not in known and kind(MOST_VALUES) in known
    assert known.is_never_the_same(kind(1)) and not known.is_never_the_same(kind("a", 1))


def test_memory_of_kinds_is_bounded(monkeypatch):
    monkeypatch.setattr(kinds_of_calls, "_MOST_KINDS", 50)
    known = KnownKinds(many_places=True)
    for number in range(1000):
        known.learn(kind(number, *range(number % 70)), "it differs")

    assert sum(1 for _ in known.reasons()) <= 51


def module_level(x: Any) -> Any:
    return x


@pytest.mark.parametrize("value", [module_level, lambda x: x, lambda x, p=(1, "a"): x, len, torch.relu, (1, None)])
def test_what_is_the_same_when_backward_comes(value):
    assert is_immutable(value)


def test_what_may_change_before_backward():
    held = [1]
    number = 1

    def counts() -> None:
        nonlocal number
        number += 1

    marked = lambda x: x  # noqa: E731
    marked.state = held
    for value in (held, counts, lambda x: (held, x), lambda x, p=held: x, marked, held.append, torch.ones(1)):
        assert not is_immutable(value)
