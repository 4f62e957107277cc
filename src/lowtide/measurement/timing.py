"""Milliseconds of calls, timed in turns.

On CPU that is processor time of the whole process, since wall time on a busy machine depends on the neighbours. The
caller sets the number of threads; with several of them processor time counts work, not how long a user waits. On an
accelerator it is the time between two events (``device/timing.py``).
"""

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from lowtide.device.timing import calls_ms
from lowtide.gc_control import gc_disabled


@dataclass(frozen=True)
class Times:
    """Samples of one method, in the order taken; their median, and the first and third quartile in milliseconds."""

    median_ms: float
    quartiles: tuple[float, float]
    samples_ms: tuple[float, ...]

    @classmethod
    def of(cls, samples_ms: list[float]) -> Self:
        several = samples_ms if len(samples_ms) > 1 else 2 * samples_ms
        first, median, third = statistics.quantiles(several, n=4, method="inclusive")
        return cls(median, (first, third), tuple(samples_ms))


def compare_times(
    methods: dict[str, Callable[[], Any]],
    *,
    rounds: int = 7,
    warmup: int = 1,
    device: str | torch.device = "cpu",
    on_round: Callable[[int, int], None] | None = None,
    seed: int = 0,
) -> dict[str, Times]:
    """Time every method once a round, in a new random order each round, so that drift affects all of them equally.

    Args:
        methods: Name -> call. What a call returns is dropped before the next begins.
        rounds: Samples of each method; ``warmup`` more rounds before are thrown away.
        on_round: Called after each round, warm-up included, with rounds done and rounds in all.
        seed: Of the order.

    Returns:
        Milliseconds by name: process CPU time on CPU, elapsed time on an accelerator.

    Raises:
        ValueError: ``rounds`` is not positive.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: nothing would be measured. Ask for 1 or more.")
    order = random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for done in range(warmup + rounds):
        for name in order.sample(sorted(methods), len(methods)):
            ms = time_ms(methods[name], device)
            if done >= warmup:
                samples[name].append(ms)
        if on_round is not None:
            on_round(done + 1, warmup + rounds)
    return {name: Times.of(taken) for name, taken in samples.items()}


def time_ms(fn: Callable[[], Any], device: str | torch.device = "cpu") -> float:
    """Return the milliseconds of one call of ``fn``, without garbage collection inside."""
    gc.collect()
    with gc_disabled():
        return calls_ms(fn, 1, device, time.process_time)
