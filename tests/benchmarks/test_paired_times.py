"""Ratios to a baseline that runs just before and just after."""

import pytest
from paired_times import paired_times


@pytest.mark.parametrize(("methods_per_baseline", "pattern"), [(2, "pmmpmp"), (1, "pmpmpmp")])
def test_a_baseline_runs_before_and_after_every_few_methods(methods_per_baseline, pattern):
    calls = []

    def call(name):
        return lambda: calls.append(name) or 1.0

    seen = []
    found = paired_times(
        call("p"), {name: call(name) for name in "abc"}, rounds=4, seed=1,
        methods_per_baseline=methods_per_baseline, on_round=lambda done, total: seen.append((done, total)),
    )  # fmt: skip

    size = len(pattern)
    rounds = [calls[i : i + size] for i in range(0, 5 * size, size)]
    assert all("".join("p" if c == "p" else "m" for c in run) == pattern for run in rounds)
    assert all(sorted(set(run)) == ["a", "b", "c", "p"] for run in rounds)
    assert len(found.baseline.samples_ms) == 4 * (pattern.count("p") - 1)
    assert all(len(t.samples_ms) == 4 for t in (*found.methods.values(), *found.ratios.values()))
    assert seen == [(done, 5) for done in range(1, 6)]


def test_a_machine_that_slows_down_does_not_change_a_ratio():
    """Every call takes a tenth longer than the one before; a ratio of medians would not be 2."""
    slower = iter(1.1**i for i in range(1000))

    found = paired_times(lambda: next(slower), {"double": lambda: 2 * next(slower)}, rounds=5, seed=0)

    assert all(abs(ratio - 2) < 0.02 for ratio in found.ratios["double"].samples_ms)
    assert max(found.methods["double"].samples_ms) > 3 * min(found.methods["double"].samples_ms)
