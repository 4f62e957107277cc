"""The fastest path through a row of stages where each arc needs memory that the arcs before it must have saved.

A shortest path with resources, by labels (Irnich and Desaulniers 2005, "Shortest path problems with resource
constraints", https://doi.org/10.1007/0-387-25486-2_2): a label is what a path up to a stage has cost and saved, and a
label that another one beats in both is dropped. Differs: where more than ``tuning.MAX_LABELS`` are left, labels
that have saved nearly the same count as equal. The answer may then be a little slower than the fastest; it is never
over the budget.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lowtide.solvers import tuning


@dataclass(frozen=True)
class Arcs:
    """Parallel arcs over stages ``[begin, end)``; each array has one entry per arc."""

    begin: int
    end: int
    ms: np.ndarray  # cost
    saved: np.ndarray  # bytes off the backward peak of later stages
    forward_saved: np.ndarray  # off their forward peak
    peaks: np.ndarray  # backward peak of these stages while no earlier stage saves anything
    forward_peaks: np.ndarray


class _Labels(NamedTuple):
    """Paths up to one stage: what they cost and have saved, and the last arc of each."""

    ms: np.ndarray
    saved: np.ndarray
    forward_saved: np.ndarray
    arcs: np.ndarray  # place of the last arc's ``Arcs``
    entries: np.ndarray  # its entry there
    before: np.ndarray  # label at its begin

    def take(self, places: np.ndarray) -> _Labels:
        return _Labels(*(column[places] for column in self))


def fastest_path(stages: int, arcs: Sequence[Arcs], budget_bytes: int) -> list[tuple[int, int]] | None:
    """Return the arcs to take from the first stage to the last, as (place in ``arcs``, entry); None where none fits."""
    by_end: list[list[int]] = [[] for _ in range(stages + 1)]
    for number, arc in enumerate(arcs):
        by_end[arc.end].append(number)
    forward_grain = max(
        max((int(np.abs(a.forward_saved).max()) for a in arcs), default=0) * stages // tuning.FORWARD_END_PARTS, 1
    )
    start = np.zeros(1, dtype=np.int64)
    labels = [_Labels(np.zeros(1), start, start, start, start, start)]
    for numbers in by_end[1:]:
        steps = [_extend(labels[arcs[n].begin], arcs[n], n, budget_bytes) for n in numbers]
        steps = steps or [labels[0].take(start[:0])]
        labels.append(_prune(_Labels(*map(np.concatenate, zip(*steps, strict=True))), forward_grain))
    if not len(labels[-1].ms):
        return None
    chosen, stage, at = [], stages, int(np.argmin(labels[-1].ms))
    while stage > 0:
        here = labels[stage]
        number = int(here.arcs[at])
        chosen.append((number, int(here.entries[at])))
        stage, at = arcs[number].begin, int(here.before[at])
    return chosen[::-1]


def least_budget(stages: int, arcs: Sequence[Arcs]) -> int:
    """Return the least budget for which there is a path."""
    free = [replace(a, ms=0 * a.ms) for a in arcs]

    def fits(budget_bytes: int) -> bool:
        return fastest_path(stages, free, budget_bytes) is not None

    most = max(0, *(int(max(a.peaks.max(), a.forward_peaks.max())) for a in arcs))
    while not fits(most):  # an arc with negative savings may come before a high one
        most = 2 * most + 1
    return bisect_left(range(most), True, key=fits)


def _extend(labels: _Labels, arcs: Arcs, number: int, budget_bytes: int) -> _Labels:
    """``labels`` extended by each of ``arcs`` that they have saved enough for."""
    fits = labels.saved[:, None] >= arcs.peaks - budget_bytes
    fits &= labels.forward_saved[:, None] >= arcs.forward_peaks - budget_bytes
    before, entries = np.nonzero(fits)
    return _Labels(
        labels.ms[before] + arcs.ms[entries],
        labels.saved[before] + arcs.saved[entries],
        labels.forward_saved[before] + arcs.forward_saved[entries],
        np.full(len(before), number),
        entries,
        before,
    )


def _prune(labels: _Labels, forward_grain: int) -> _Labels:
    grain = 1
    while len(found := _undominated(labels, forward_grain, grain)) > tuning.MAX_LABELS:
        grain *= 4
    return labels.take(found)


def _undominated(labels: _Labels, forward_grain: int, grain: int) -> np.ndarray:
    """Places of labels that no other beats in time without having saved less."""
    saved = labels.saved // grain
    keys = (labels.ms, -saved) if grain == 1 else (-labels.saved, labels.ms, -saved)
    forward = labels.forward_saved // forward_grain
    order = np.lexsort((*keys, forward) if forward.any() else keys)
    ms, forward = labels.ms[order], forward[order]
    if not len(ms):
        return order
    # The least time so far within each value of ``forward``: the times of each are shifted below those before.
    new = np.concatenate([[False], forward[1:] != forward[:-1]])
    shifted = ms - np.cumsum(new) * (ms.max() - ms.min() + 1.0)
    best = np.minimum.accumulate(shifted)
    keep = np.concatenate([[True], shifted[1:] < best[:-1]])
    # Of those that count as equal one has saved most, and may be the only one that fits later.
    if grain > 1:
        keep[np.flatnonzero(labels.saved[order] == labels.saved.max())[:1]] = True
    return order[keep]
