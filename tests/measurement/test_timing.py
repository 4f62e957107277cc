"""Timing in turns: the order, what a sample includes, what is computed from samples."""

import gc
import time

import pytest

from lowtide.measurement.timing import Times, compare_times


@pytest.mark.slow
def test_methods_take_turns_in_an_order_that_the_seed_fixes():
    def order(seed):
        calls = []
        methods = {name: (lambda name=name: calls.append(name)) for name in "abc"}
        times = compare_times(methods, rounds=4, warmup=1, seed=seed)
        assert all(len(t.samples_ms) == 4 for t in times.values())
        return calls

    calls = order(seed=1)

    assert [sorted(calls[i : i + 3]) for i in range(0, 15, 3)] == [["a", "b", "c"]] * 5
    assert calls == order(seed=1) != order(seed=2)


def test_milliseconds_are_processor_time_and_every_round_is_reported(monkeypatch):
    now, seen = [0.0], []
    monkeypatch.setattr(time, "process_time", lambda: now[0])

    def work(seconds):
        now[0] += seconds

    times = compare_times(
        {"one": lambda: work(0.001), "ten": lambda: work(0.01)},
        rounds=3,
        on_round=lambda done, total: seen.append((done, total)),
    )

    assert times["one"].samples_ms == pytest.approx([1.0] * 3)
    assert times["ten"].samples_ms == pytest.approx([10.0] * 3)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_the_quartiles_enclose_the_median():
    assert Times.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Times(3.0, (2.0, 4.0), (4.0, 1.0, 3.0, 2.0, 5.0))
    assert Times.of([2.0]) == Times(2.0, (2.0, 2.0), (2.0,))


def test_a_sample_runs_without_garbage_collection_and_leaves_it_on():
    enabled = []

    compare_times({"a": lambda: enabled.append(gc.isenabled())}, rounds=2)

    assert enabled == [False] * 3
    assert gc.isenabled()


def test_no_rounds_is_an_error():
    with pytest.raises(ValueError, match="rounds=0"):
        compare_times({"a": lambda: None}, rounds=0)
