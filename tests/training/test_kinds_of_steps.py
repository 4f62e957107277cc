"""Which kind of step is the usual one, as far as the last ones say."""

import random

import pytest

from lowtide.training.kinds_of_steps import UsualKinds

PATTERN = "train float32[8]"


def noted(*kinds: int | None) -> UsualKinds:
    usual = UsualKinds()
    for kind in kinds:
        usual.note(PATTERN, kind)
    return usual


def drawn(share: float, steps: int) -> list[int]:
    """Kind 0 so often, and one of eight others else."""
    numbers = random.Random(1)
    return [0 if numbers.random() < share else 1 + numbers.randrange(8) for _ in range(steps)]


@pytest.mark.parametrize("looks_back", [True, False])
def test_a_kind_of_two_steps_in_five_stays_the_usual_one(looks_back, monkeypatch):
    if not looks_back:  # further than the last six steps
        monkeypatch.setattr(UsualKinds, "is_often", lambda self, pattern, kind: False)
    usual, num_lost = noted(*[0] * 8), 0
    for kind in drawn(0.4, 1000):
        usual.note(PATTERN, kind)
        num_lost += not usual.is_usual(PATTERN, 0)

    assert (num_lost <= 20) == looks_back


def test_a_kind_that_another_has_taken_the_place_of_is_not_usual():
    assert noted(*[0] * 10, *[1] * 5).is_usual(PATTERN, 0)
    assert not noted(*[0] * 10, *[1] * 6).is_usual(PATTERN, 0)


def test_a_kind_that_has_become_rare_is_not_usual():
    assert noted(*[0] * 4, *range(1, 13)).is_usual(PATTERN, 0)
    assert not noted(*[0] * 4, *range(1, 14)).is_usual(PATTERN, 0)
    assert noted(0, 0, 1, 1, 0, 1, 1).is_usual(PATTERN, 0)
    assert not noted(0, 1, 1, 1).is_usual(PATTERN, 0)


def test_steps_that_nobody_saw_are_no_kind():
    assert not noted(None, None).is_usual(PATTERN, None)
    assert noted(None, None, None, 0).is_usual(PATTERN, 0)


def test_each_wait_is_twice_as_long():
    usual = UsualKinds()
    lengths = []
    for _ in range(4):
        usual.wait_for_usual(PATTERN)
        steps = 0
        while usual.waits(PATTERN):
            usual.note(PATTERN, 0)
            steps += 1
        lengths.append(steps)
        assert usual.is_worth_a_plan(PATTERN, 0)

    assert lengths == [4, 16, 48, 112]


def test_recorded_steps_of_rarer_kinds_end_in_another_wait():
    usual = UsualKinds()
    usual.wait_for_usual(PATTERN)
    for kind in (0, 0, 0, 0):
        usual.note(PATTERN, kind)

    for kind in range(1, 6):
        assert not usual.is_worth_a_plan(PATTERN, kind)
        assert not usual.waits(PATTERN)
    assert not usual.is_worth_a_plan(PATTERN, 6)
    assert usual.waits(PATTERN)


def test_kinds_vary_while_more_than_one_is_remembered():
    assert not noted(0, 0).vary(PATTERN)
    assert noted(0, 1).vary(PATTERN)
    assert not noted(1, *[0] * 16).vary(PATTERN)
    assert not noted(0, None, 0).vary(PATTERN)  # a plan of sizes that nobody has watched has no kind
