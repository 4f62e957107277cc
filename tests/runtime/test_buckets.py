"""Which shapes to plan for, from the lengths seen."""

from itertools import combinations

import pytest
from support.watched_shapes import decoder_family, decoder_of

from lowtide.graph.costs import Costs
from lowtide.runtime import buckets
from lowtide.runtime.buckets import plan_buckets
from lowtide.runtime.dimensions import covers
from lowtide.simulation.simulator import simulate_actions

LENGTHS = [(1, n) for n in (4, 8, 8, 8, 10, 12, 12, 14, 20, 20, 24, 31)]


@pytest.fixture(scope="module")
def family():
    return decoder_family((1, 8), (1, 16), (1, 24), layers=1)


def plain_peak(shape):
    graph = decoder_of(*shape, layers=1)
    return simulate_actions(graph, Costs((0.0,) * len(graph.ops)), {}).peak_bytes


def test_shapes_that_fit_plain_need_no_plan(family):
    found = plan_buckets(family, LENGTHS, plain_peak((1, 12)), 2)

    assert found.plain == ((1, 12),)
    assert all(found.fits_plain((1, n)) for n in (1, 8, 12)) and not found.fits_plain((1, 13))
    assert all(shape[1] > 12 for shape in found.planned) and len(found.planned) == 2
    assert found.unknown == ()


def test_where_everything_fits_nothing_is_planned(family):
    found = plan_buckets(family, LENGTHS, plain_peak((1, 31)), 2)

    assert (found.plain, found.planned, found.expected_share) == (((1, 31),), (), 0.0)


def test_every_seen_shape_is_served_by_the_smallest_plan_that_covers_it(family):
    found = plan_buckets(family, LENGTHS, plain_peak((1, 8)), 3)

    for shape in LENGTHS:
        serving = found.serving(shape)
        assert found.fits_plain(shape) or covers(serving, shape)
        assert all(not covers(other, shape) or other >= serving for other in found.planned)
    assert found.serving((1, 32)) is None and found.serving((2, 8)) is None


@pytest.mark.parametrize("max_plans", [1, 2, 3])
def test_no_other_choice_of_shapes_recomputes_less(family, max_plans):
    budget = plain_peak((1, 8))
    tight = sorted({shape for shape in LENGTHS if plain_peak(shape) > budget})

    def recomputed(chosen):
        """Expected bytes if each shape is served by the smallest chosen one that covers it."""
        total = 0.0
        for shape in (s for s in LENGTHS if s in tight):
            top = min(c for c in chosen if covers(c, shape))
            share = (plain_peak(top) - budget) / (plain_peak(top) - 1000)
            total += share * (plain_peak(shape) - 1000)
        return total

    choices = [c for k in range(1, max_plans + 1) for c in combinations(tight, k) if tight[-1] in c]
    found = plan_buckets(family, LENGTHS, budget, max_plans)

    assert recomputed(found.planned) == pytest.approx(min(map(recomputed, choices)))
    everything = sum(plain_peak(shape) - 1000 for shape in LENGTHS)
    assert found.expected_share == pytest.approx(recomputed(found.planned) / everything)


def test_more_plans_never_recompute_more(family):
    shares = [plan_buckets(family, LENGTHS, plain_peak((1, 8)), k).expected_share for k in range(1, 7)]

    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1] > 0


def test_many_lengths_are_taken_together_and_all_served(family, monkeypatch):
    monkeypatch.setattr(buckets, "_MOST_SHAPES", 5)
    seen = [(1, n) for n in range(1, 41)]

    found = plan_buckets(family, seen, plain_peak((1, 13)), 3)

    assert found.plain == ((1, 13),)  # though neighbours on both sides of it are one group
    assert len(found.planned) == 3 and found.planned[-1] == (1, 40)


def test_batch_and_length_meet_in_the_least_shape_that_covers_both():
    family = decoder_family((1, 8), (1, 16), (2, 8), (2, 16), layers=1)

    found = plan_buckets(family, [(4, 10), (2, 24)], plain_peak((1, 8)), 1)

    assert found.planned == ((4, 24),)


def test_shapes_that_the_family_does_not_know_are_named(family):
    found = plan_buckets(family, [(1, 8), (2, 16), (1, 31)], plain_peak((1, 8)), 2)

    assert found.unknown == ((2, 16),)
    assert found.plain == ((1, 8),) and found.planned == ((1, 31),)


def test_senseless_arguments_are_refused(family):
    with pytest.raises(ValueError, match="max_plans=0: no shape could be planned for"):
        plan_buckets(family, LENGTHS, 10_000, 0)
    with pytest.raises(ValueError, match="dimensions_seen is empty"):
        plan_buckets(family, [], 10_000, 1)
