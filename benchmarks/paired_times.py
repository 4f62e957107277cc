"""Times of methods as ratios to a baseline that runs just before and just after them.

Shared machines change speed within a minute. A ratio to the mean of the baseline just before and just after depends on
the method only; a ratio of two medians also depends on when each was measured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lowtide.measurement.timing import Times


class PairedTimes(NamedTuple):
    """Milliseconds of the baseline, milliseconds by method, and ratios by method (a ``Times`` of plain numbers)."""

    baseline: Times
    methods: dict[str, Times]
    ratios: dict[str, Times]


def paired_times(
    baseline_ms: Callable[[], float],
    methods_ms: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    seed: int,
    methods_per_baseline: int = 2,
    on_round: Callable[[int, int], None] | None = None,
) -> PairedTimes:
    """Run all methods in each round, in a new random order, and the baseline before, between and after them.

    Args:
        baseline_ms, methods_ms: Each runs once and returns its milliseconds.
        rounds: One more round, before the first, is thrown away.
        methods_per_baseline: How many methods run between two runs of the baseline.
        on_round: Called after each round with rounds done and rounds in all.
    """
    from lowtide.measurement.timing import Times

    order = random.Random(seed)
    baseline: list[float] = []
    taken: dict[str, list[float]] = {name: [] for name in methods_ms}
    ratios: dict[str, list[float]] = {name: [] for name in methods_ms}
    for done in range(rounds + 1):
        names = order.sample(sorted(methods_ms), len(methods_ms))
        before = baseline_ms()
        for first in range(0, len(names), methods_per_baseline):
            between = names[first : first + methods_per_baseline]
            spent = [methods_ms[name]() for name in between]
            after = baseline_ms()
            if done:
                baseline.append(after)
                for name, ms in zip(between, spent, strict=True):
                    taken[name].append(ms)
                    ratios[name].append(2 * ms / (before + after))
            before = after
        if on_round is not None:
            on_round(done + 1, rounds + 1)
    return PairedTimes(
        Times.of(baseline),
        {name: Times.of(found) for name, found in taken.items()},
        {name: Times.of(found) for name, found in ratios.items()},
    )
