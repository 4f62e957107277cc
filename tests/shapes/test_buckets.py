"""Which shapes to plan for, from the lengths seen."""

from collections import Counter
from itertools import combinations

import pytest
from support.watched_shapes import decoder_family, decoder_of

from lowtide.graph.costs import Costs
from lowtide.shapes import buckets
from lowtide.shapes.buckets import Expected, least_missed, next_bucket
from lowtide.simulation.simulator import simulate_actions

LENGTHS = [(1, n) for n in (4, 8, 8, 8, 10, 12, 12, 14, 20, 20, 24, 31)]


@pytest.fixture(scope="module")
def family():
    return decoder_family((1, 8), (1, 16), (1, 24), layers=1)


def plain_peak(shape):
    graph = decoder_of(*shape, layers=1)
    return simulate_actions(graph, Costs((0.0,) * len(graph.ops)), {}).peak_bytes


def expected_of(family, shapes, budget_bytes):
    return Expected(Counter(shapes), family.plain_bytes, budget_bytes)


def chosen(expected, max_plans, tops=()):
    """What is at hand when no other plan is worth its while."""
    tops = list(tops)
    while (top := next_bucket(expected, tops, max_plans)) is not None:
        if len(tops) == max_plans:
            del tops[least_missed(expected, tops, [top])]
        tops.append(top)
    return sorted(tops)


def test_the_plain_peak_is_the_judges(family):
    assert all(family.plain_bytes(shape) == (plain_peak(shape), 1000) for shape in [(1, 4), (1, 31), (1, 100)])


def test_shapes_that_fit_plain_share_one_plan(family):
    found = chosen(expected_of(family, LENGTHS, plain_peak((1, 12))), 3)

    assert [n for _, n in found if n <= 12] == [12]
    assert found[-1] == (1, 31)
    assert chosen(expected_of(family, LENGTHS, plain_peak((1, 31))), 3) == [(1, 31)]


@pytest.mark.parametrize("max_plans", [1, 2, 3, 4])
def test_nearly_as_little_is_recomputed_as_under_the_best_choice(family, max_plans):
    expected = expected_of(family, LENGTHS, plain_peak((1, 8)))
    best = min(map(expected.recomputed_bytes, combinations(sorted(set(LENGTHS)), max_plans)))
    everything = sum(expected.weights.values())

    found = chosen(expected, max_plans)

    assert len(found) <= max_plans
    assert expected.recomputed_bytes(found) <= best + 0.02 * everything


def test_a_plan_that_is_missed_least_makes_room(family):
    expected = expected_of(family, LENGTHS, plain_peak((1, 8)))

    assert least_missed(expected, [(1, 8), (1, 30), (1, 31)]) == 1
    assert least_missed(expected, [(1, 8), (1, 30)], [(1, 31)]) == 1
    found = chosen(expected, 3, [(1, 29), (1, 30), (1, 31)])
    assert len(found) == 3 and found[0] == (1, 8) and found[-1] == (1, 31)


def test_a_little_less_recompute_is_not_worth_a_plan(family):
    often = [(1, 31)] * 1000 + [(1, 30)]

    assert next_bucket(expected_of(family, often, plain_peak((1, 8))), [(1, 31)], 8) is None


def test_many_lengths_are_taken_together_and_all_served(family, monkeypatch):
    monkeypatch.setattr(buckets, "_MOST_TOPS", 5)

    found = chosen(expected_of(family, [(1, n) for n in range(1, 41)], plain_peak((1, 13))), 3)

    assert len(found) == 3 and found[-1] == (1, 40)


def test_batch_and_length_meet_in_the_least_shape_that_covers_both():
    family = decoder_family((1, 8), (1, 16), (2, 8), (2, 16), layers=1)

    assert next_bucket(expected_of(family, [(4, 10), (2, 24)], plain_peak((1, 8))), [], 1) == (4, 24)


def test_shapes_that_the_family_does_not_know_do_not_count(family):
    assert next_bucket(expected_of(family, [(1, 31), (2, 31)], plain_peak((1, 8))), [], 2) == (1, 31)
    assert next_bucket(expected_of(family, [(2, 31)], plain_peak((1, 8))), [], 2) is None


def test_senseless_arguments_are_refused(family):
    with pytest.raises(ValueError, match="max_plans=0: no shape could be planned for"):
        next_bucket(expected_of(family, LENGTHS, 10_000), [], 0)
