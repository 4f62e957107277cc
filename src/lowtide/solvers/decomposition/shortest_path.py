"""The fastest way through a row of stages where each way takes memory that the ways before it must have saved.

A shortest path with resources, by labels (Irnich and Desaulniers 2005, "Shortest path problems with resource
constraints", https://doi.org/10.1007/0-387-25486-2_2): a label is what some choice of ways up to a stage has cost and
saved, and one that another beats in both is dropped. Differs: where more than ``tuning.MAX_LABELS`` are left, labels
that have saved nearly the same count as equal. The answer may then be a little slower than the fastest; it is never
over the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.solvers import tuning


@dataclass(frozen=True)
class Arcs:
    """Ways to run stages ``[begin, end)``, an entry of each array for each.

    Attributes:
        ms: What a way costs.
        saved: Bytes that it takes off the backward peak of the stages after it. ``late_saved``: off their forward peak.
        peaks: In backward, as long as nothing before it has saved any. ``forward_peaks``: in forward.
    """

    begin: int
    end: int
    ms: np.ndarray
    saved: np.ndarray
    late_saved: np.ndarray
    peaks: np.ndarray
    forward_peaks: np.ndarray


@dataclass(frozen=True)
class _Labels:
    """Choices of ways up to one stage: what they cost and have saved, and the last step of each."""

    ms: np.ndarray
    saved: np.ndarray
    late_saved: np.ndarray
    ways: np.ndarray  # number of the last ways taken
    picks: np.ndarray  # which of them
    before: np.ndarray  # label at their begin

    def take(self, places: np.ndarray) -> _Labels:
        return _Labels(*(getattr(self, name)[places] for name in self.__dataclass_fields__))


def fastest(stages: int, ways: Sequence[Arcs], budget_bytes: int) -> list[tuple[int, int]] | None:
    """Return the ways to take from the first stage to the last, as (place in ``ways``, entry); None where none fits."""
    by_end: list[list[int]] = [[] for _ in range(stages + 1)]
    for number, way in enumerate(ways):
        by_end[way.end].append(number)
    late_grain = max(
        max((int(np.abs(w.late_saved).max()) for w in ways), default=0) * stages // tuning.FORWARD_END_PARTS, 1
    )
    start = np.zeros(1, dtype=np.int64)
    labels = [_Labels(np.zeros(1), start, start, start, start, start)]
    for numbers in by_end[1:]:
        steps = [_longer(labels[ways[n].begin], ways[n], n, budget_bytes) for n in numbers]
        labels.append(_worth_keeping(_joined(steps), late_grain))
    if not len(labels[-1].ms):
        return None
    chosen, stage, at = [], stages, int(np.argmin(labels[-1].ms))
    while stage > 0:
        here = labels[stage]
        number = int(here.ways[at])
        chosen.append((number, int(here.picks[at])))
        stage, at = ways[number].begin, int(here.before[at])
    return chosen[::-1]


def least_bytes(stages: int, ways: Sequence[Arcs]) -> int:
    """Return the least budget for which there is a way through."""
    still = [Arcs(w.begin, w.end, 0 * w.ms, w.saved, w.late_saved, w.peaks, w.forward_peaks) for w in ways]
    low, high = -1, max(0, *(int(max(w.peaks.max(), w.forward_peaks.max())) for w in ways))
    while fastest(stages, still, high) is None:  # a way that saves less than nothing may come before a high one
        low, high = high, 2 * high + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fastest(stages, still, middle) is None:
            low = middle
        else:
            high = middle
    return high


def _longer(labels: _Labels, ways: Arcs, number: int, budget_bytes: int) -> _Labels:
    """``labels`` with each of ``ways`` that they have saved enough for."""
    fits = labels.saved[:, None] >= ways.peaks - budget_bytes
    fits &= labels.late_saved[:, None] >= ways.forward_peaks - budget_bytes
    before, picks = np.nonzero(fits)
    return _Labels(
        labels.ms[before] + ways.ms[picks],
        labels.saved[before] + ways.saved[picks],
        labels.late_saved[before] + ways.late_saved[picks],
        np.full(len(before), number),
        picks,
        before,
    )


def _joined(steps: list[_Labels]) -> _Labels:
    none = np.zeros(0, dtype=np.int64)
    columns = zip(*([getattr(s, name) for name in _Labels.__dataclass_fields__] for s in steps), strict=True)
    return _Labels(*(np.concatenate(c) for c in columns)) if steps else _Labels(none, none, none, none, none, none)


def _worth_keeping(labels: _Labels, late_grain: int) -> _Labels:
    grain = 1
    while len(found := _undominated(labels, late_grain, grain)) > tuning.MAX_LABELS:
        grain *= 4
    return labels.take(found)


def _undominated(labels: _Labels, late_grain: int, grain: int) -> np.ndarray:
    """Places of labels that no other beats in time without having saved less."""
    saved = labels.saved // grain
    keys = (labels.ms, -saved) if grain == 1 else (-labels.saved, labels.ms, -saved)
    late = labels.late_saved // late_grain
    order = np.lexsort((*keys, late) if late.any() else keys)
    ms, late = labels.ms[order], late[order]
    if not len(ms):
        return order
    # The least time so far, begun anew for each ``late``: each one's times are put below all of those before.
    new = np.concatenate([[False], late[1:] != late[:-1]])
    shifted = ms - np.cumsum(new) * (ms.max() - ms.min() + 1.0)
    best = np.minimum.accumulate(shifted)
    keep = np.concatenate([[True], shifted[1:] < best[:-1]])
    # Of those that count as equal one has saved most, and may be the only one that fits later.
    if grain > 1:
        keep[np.flatnonzero(labels.saved[order] == labels.saved.max())[:1]] = True
    return order[keep]
