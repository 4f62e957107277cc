"""Names beside points of a picture, none over another: where each goes, in the picture's own units."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_SIDES = ((1, 0), (0, -1), (0, 1), (-1, 0), (1, -1), (1, 1), (-1, -1), (-1, 1))
_FARTHER = tuple((along, up) for up in (-2, 2, -4, 4, -6) for along in (1, 0, -1))  # where all sides are taken


@dataclass(frozen=True)
class Label:
    """``text`` belongs to the point (x, y); its box has this left end and this middle height."""

    text: str
    x: float
    y: float
    left: float
    middle: float


def joined(points: Sequence[tuple[str, float, float]], within: float) -> list[tuple[str, float, float]]:
    """Points that lie on one another as one, with all their names: ``full, rotor``."""
    found: list[tuple[list[str], float, float]] = []
    for name, x, y in points:
        for names, at_x, at_y in found:
            if abs(at_x - x) <= within and abs(at_y - y) <= within:
                names += [name] if name not in names else []
                break
        else:
            found.append(([name], x, y))
    return [(", ".join(names), x, y) for names, x, y in found]


def along(points: Sequence[tuple[float, float]], step: float) -> list[tuple[float, float]]:
    """Points on a line, about ``step`` apart: enough to keep labels off it."""
    found = []
    for (x1, y1), (x2, y2) in pairwise(points):
        count = max(1, int(math.hypot(x2 - x1, y2 - y1) / step))
        found += [(x1 + (x2 - x1) * i / count, y1 + (y2 - y1) * i / count) for i in range(count + 1)]
    return found


def placed(
    points: Sequence[tuple[str, float, float]],
    others: Sequence[tuple[float, float]],
    *,
    size: tuple[float, float],
    letter: float,
    line: float,
) -> list[Label]:
    """One label a point, on the first side where it lies on no other label and no point; else the least crowded.

    Args:
        others: More points to keep clear of: those of a curve.
        size: Of the picture; labels stay inside.
        letter, line: Width of a letter and height of a line.
    """
    taken: list[tuple[float, float, float, float]] = []
    marks = [(x - line / 2, y - line / 2, x + line / 2, y + line / 2) for _, x, y in points]
    marks += [(x - line / 4, y - line / 4, x + line / 4, y + line / 4) for x, y in others]
    labels = []
    for i, (text, x, y) in enumerate(points):
        width = letter * len(text)
        best: tuple[float, tuple[float, float, float, float]] | None = None
        for along, up in (*_SIDES, *_FARTHER):
            gap = 0.75 * line
            left = x + gap if along > 0 else x - gap - width if along < 0 else x - width / 2
            middle = y + up * line * (1.0 if along == 0 else 0.7)
            box = (left, middle - line / 2, left + width, middle + line / 2)
            crowd = sum(_overlap(box, other) for other in [*taken, *marks[:i], *marks[i + 1 :]])
            outside = box[0] < 0 or box[2] > size[0] or box[1] < 0 or box[3] > size[1]
            crowd += 10 * width * line if outside else 0.0
            if best is None or crowd < best[0]:
                best = crowd, box
            if not crowd:
                break
        assert best is not None
        taken.append(best[1])
        labels.append(Label(text, x, y, best[1][0], (best[1][1] + best[1][3]) / 2))
    return labels


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    return max(min(a[2], b[2]) - max(a[0], b[0]), 0.0) * max(min(a[3], b[3]) - max(a[1], b[1]), 0.0)
