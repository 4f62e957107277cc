"""Charts as inline SVG text, for a page without scripts or other files. Colours come from the page's CSS variables."""

import math
from html import escape

from lowtide.reports.curves import Curves
from lowtide.units import format_bytes

_WIDTH, _HEIGHT = 920, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 12, 14, 44


def memory_chart(curves: Curves, budget_bytes: int | None) -> str:
    """Memory over the step: the plain step's area behind the planned one's, and the budget as a line."""
    top = 1.06 * max(*curves.plain_bytes, *curves.planned_bytes, budget_bytes or 0)
    end = curves.at[-1] or 1.0

    def x(at: float) -> float:
        return _LEFT + at / end * (_WIDTH - _LEFT - _RIGHT)

    def y(count: float) -> float:
        return _HEIGHT - _BOTTOM - count / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Memory over one training step">']
    for tick in round_ticks(top):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{_amount(tick)}</text>')
    for at in decimal_ticks(end):
        parts.append(f'<line class="grid" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{y(0):.1f}" y2="{y(0) + 5:.1f}"/>')
        parts.append(f'<text x="{x(at):.1f}" y="{y(0) + 18:.1f}" text-anchor="middle">{at:g}</text>')
    for name, series in (("plain", curves.plain_bytes), ("planned", curves.planned_bytes)):
        line = _steps([(x(at), y(count)) for at, count in zip(curves.at, series)])
        area = f"{line} V{y(0):.1f} H{x(curves.at[0]):.1f} Z"
        parts.append(f'<path class="area {name}" d="{area}"/><path class="line {name}" d="{line}"/>')
    middle = x(curves.backward_at)
    parts.append(f'<line class="divide" x1="{middle:.1f}" x2="{middle:.1f}" y1="{_TOP}" y2="{y(0):.1f}"/>')
    parts.append(f'<text x="{middle - 8:.1f}" y="{_HEIGHT - 6}" text-anchor="end">forward</text>')
    parts.append(f'<text x="{middle + 8:.1f}" y="{_HEIGHT - 6}">backward</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">{escape(curves.axis)}</text>')
    if budget_bytes is not None:
        at = y(budget_bytes)
        parts.append(f'<line class="budget" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
    return "\n".join([*parts, "</svg>"])


def round_ticks(top: float) -> list[int]:
    """Three to six round amounts of memory from 0 up to at most ``top``."""
    step = 1
    while top / step > 6:
        step *= 2
    return [step * i for i in range(int(top / step) + 1)]


def decimal_ticks(end: float) -> list[float]:
    """Five to eleven round numbers from 0 up to at most ``end``: multiples of 1, 2 or 5 times a power of ten."""
    step = 10.0 ** math.floor(math.log10(end))
    step *= next(factor for factor in (0.1, 0.2, 0.5, 1.0) if end / (step * factor) <= 10)
    return [round(step * i, 12) for i in range(int(end / step) + 1)]


def _amount(tick: int) -> str:
    """``64 MiB``: ticks are round."""
    return format_bytes(tick).replace(".00 ", " ")


def _steps(points: list[tuple[float, float]]) -> str:
    """A path that holds each value until the next moment: memory does not ramp."""
    (x, y), *rest = points
    return f"M{x:.1f} {y:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in rest)
