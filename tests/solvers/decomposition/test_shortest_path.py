"""The fastest way through a row of stages, against trying every one."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples

from lowtide.solvers import tuning
from lowtide.solvers.decomposition.shortest_path import Arcs, fastest_path, least_budget


@st.composite
def rows(draw):
    """A few stages and the ways through them."""
    stages = draw(st.integers(1, 4))
    runs = [(a, b) for a in range(stages) for b in range(a + 1, min(a + 3, stages) + 1)]
    picked = [run for run in runs if run[1] - run[0] == 1 or draw(st.booleans())]
    number = st.integers(-20, 60)

    def array(size, numbers=number):
        return np.array(draw(st.lists(numbers, min_size=size, max_size=size)), dtype=np.int64)

    found = []
    for begin, end in picked:
        size = draw(st.integers(1, 3))
        ms = array(size, st.integers(0, 9)).astype(float)
        late = array(size) if draw(st.booleans()) else np.zeros(size, dtype=np.int64)
        found.append(Arcs(begin, end, ms, array(size), late, array(size), array(size)))
    return stages, found


def all_ways(stages, ways):
    """Every way from the first stage to the last, as (time, least budget)."""

    def go(stage, ms, saved, late, need):
        if stage == stages:
            yield ms, need
            return
        for way in ways:
            for i in range(len(way.ms) if way.begin == stage else 0):
                here = max(need, way.peaks[i] - saved, way.forward_peaks[i] - late)
                yield from go(way.end, ms + way.ms[i], saved + way.saved[i], late + way.forward_saved[i], here)

    return list(go(0, 0.0, 0, 0, 0))


def cost(stages, ways, picks, budget):
    """Time of ``picks``, which must lead through all stages within ``budget``."""
    stage, ms, saved, late = 0, 0.0, 0, 0
    for number, i in picks:
        way = ways[number]
        assert way.begin == stage
        assert way.peaks[i] - saved <= budget and way.forward_peaks[i] - late <= budget
        stage, ms, saved, late = way.end, ms + way.ms[i], saved + way.saved[i], late + way.forward_saved[i]
    assert stage == stages
    return ms


@settings(max_examples=examples(400), deadline=None)
@given(row=rows(), budget=st.integers(0, 60))
def test_no_way_within_the_budget_is_faster(row, budget):
    stages, ways = row
    within = [ms for ms, need in all_ways(stages, ways) if need <= budget]
    picks = fastest_path(stages, ways, budget)
    if within:
        assert picks is not None and cost(stages, ways, picks, budget) == min(within)
    else:
        assert picks is None


@settings(max_examples=examples(200), deadline=None)
@given(row=rows())
def test_the_least_budget_has_a_way_and_one_byte_less_has_none(row):
    stages, ways = row
    least = least_budget(stages, ways)
    assert fastest_path(stages, ways, least) is not None
    assert least == max(0, min(need for _, need in all_ways(stages, ways)))


def test_many_labels_are_thinned_out_and_what_is_found_still_fits(monkeypatch):
    rng = np.random.default_rng(0)
    stages, size = 12, 6
    ways = []
    for stage in range(stages):
        saved = rng.integers(0, 10**6, size)
        ms = saved / 10**5 + rng.random(size)
        ways.append(Arcs(stage, stage + 1, ms, saved, 0 * saved, rng.integers(0, 4 * 10**6, size), 0 * saved))
    budget = int(1.2 * least_budget(stages, ways))
    best = cost(stages, ways, fastest_path(stages, ways, budget), budget)
    monkeypatch.setattr(tuning, "MAX_LABELS", 50)
    thinned = cost(stages, ways, fastest_path(stages, ways, budget), budget)
    assert best <= thinned <= 1.05 * best
    assert fastest_path(stages, ways, least_budget(stages, ways)) is not None


def test_of_two_budgets_the_larger_is_never_slower():
    rng = np.random.default_rng(1)
    stages = 8
    ways = [
        Arcs(s, e, rng.random(4), rng.integers(0, 50, 4), np.zeros(4, dtype=np.int64), rng.integers(0, 200, 4),
             np.zeros(4, dtype=np.int64))
        for s, e in itertools.chain(zip(range(8), range(1, 9), strict=True), zip(range(6), range(3, 9), strict=True))
    ]  # fmt: skip
    least = least_budget(stages, ways)
    times = [cost(stages, ways, fastest_path(stages, ways, b), b) for b in range(least, least + 200, 10)]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
