"""The largest batch and the longest sequence that fit: guessed from two traced sizes, and traced to make sure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lowtide.errors import LowtideError
from lowtide.foresight.forecaster import Forecaster, Room
from lowtide.foresight.training_setup import TrainingSetup

SEQ_LEN_STEP = 128
# Traces, and how many times larger the next one is while one size is known. Steps of so many ops that each trace takes
# ten seconds have few, far apart.
_SEARCH, _LARGE_SEARCH = (5, 2), (3, 8)
_MOST = 1 << 22


def max_batch_size(forecaster: Forecaster, setup: TrainingSetup, *, plain: bool = False) -> int:
    """Sequences of one micro-batch of one rank; 0: not one."""
    if forecaster.refuses(setup):
        return 0
    return _largest(
        lambda n: forecaster.room(replace(setup, batch_size=n), plain=plain), setup.batch_size, _MOST,
        _LARGE_SEARCH if forecaster.is_large(setup) else _SEARCH,
    )  # fmt: skip


def max_seq_len(forecaster: Forecaster, setup: TrainingSetup, *, plain: bool = False) -> int:
    """Tokens of each sequence, a multiple of 128 (or as many as asked for); 0: none."""
    if forecaster.refuses(setup):
        return 0
    most = forecaster.subject.seq_len_most or _MOST
    step = SEQ_LEN_STEP if setup.seq_len >= SEQ_LEN_STEP else 1

    def room(units: int) -> Room:
        return forecaster.room(replace(setup, seq_len=min(units * step, most)), plain=plain)

    found = min(_largest(room, -(-setup.seq_len // step), -(-most // step), _SEARCH) * step, most)
    return max(found, setup.seq_len) if forecaster.room(setup, plain=plain).fits else found


def _largest(room: Callable[[int], Room], start: int, most: int, search: tuple[int, int]) -> int:
    """The largest number up to ``most`` that fits. What is missing grows with the number, about linearly.

    Where that many traces do not find the end, the largest that was seen to fit.
    """
    known: dict[int, float] = {}
    low, high = 0, most + 1  # the largest that fits, the least that does not
    number = max(1, min(start, most))
    traces, growth = search
    for _ in range(traces):
        try:
            found = room(number)
        except LowtideError:  # the model refuses such a size
            found = Room(False, float("inf"))
        known[number] = found.missing_bytes
        low, high = (number, high) if found.fits else (low, number)
        guess = _guess(known, number, growth)
        if high - low <= 1 or (len(known) > 2 and guess <= low):  # the line says the same
            break
        number = min(max(guess, low + 1), high - 1)
    return low


def _guess(known: dict[int, float], last: int, growth: int) -> int:
    """Where the line through the two nearest known numbers crosses zero."""
    finite = sorted((n for n in known if known[n] < float("inf")), key=lambda n: abs(known[n]))[:2]
    if len(finite) < 2:
        return growth * last if known[last] <= 0 else last // growth
    a, b = finite
    slope = (known[b] - known[a]) / (b - a)
    return int(a - known[a] / slope) if slope > 0 else growth * last
