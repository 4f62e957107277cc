"""Charts as inline SVG text, for a page without scripts or other files. Colours come from the page's CSS variables.

Each chart is drawn twice, wide and narrow; the page shows the one that can be read.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from lowtide.explanation import LinkUse
from lowtide.plan import RECOMPUTE, SAVE
from lowtide.reports.curves import Curves
from lowtide.reports.labels import along, joined, placed
from lowtide.reports.trade_off import TradeOff, extra_scale
from lowtide.units import format_bytes

_WIDE, _NARROW = 920, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 86, 12, 14, 44
_LANE, _LANE_GAP = 26, 8
_LETTER = 6.6  # width of a letter of a label, in the size that the page sets
LANE_NAMES = {SAVE: "saved", RECOMPUTE: "recomputed"}  # all others: moved
_LANE_CLASSES = {SAVE: "save", RECOMPUTE: "recompute"}


def memory_chart(curves: Curves, budget_bytes: int | None) -> str:
    """Memory over the step: the plain step's area behind the planned one's, the budget as a line, and below what is
    decided for the tensors, at the moments when they are made and brought back."""
    return _both(lambda width: _memory(curves, budget_bytes, width))


def _memory(curves: Curves, budget_bytes: int | None, width: int) -> str:
    top = 1.06 * max(*curves.plain_bytes, *curves.planned_bytes, budget_bytes or 0)
    end = curves.at[-1] or 1.0
    floor = 286.0
    height = int(floor + _BOTTOM + len(curves.lanes) * (_LANE + _LANE_GAP))

    def x(at: float) -> float:
        return _LEFT + at / end * (width - _LEFT - _RIGHT)

    def y(count: float) -> float:
        return floor - count / top * (floor - _TOP)

    parts = [_opening(width, height, "Memory over one training step")]
    for tick in round_ticks(top):
        parts.append(_line("grid", _LEFT, y(tick), width - _RIGHT, y(tick)))
        parts.append(_text(_LEFT - 8, y(tick) + 4, _amount(tick), "end"))
    ticks = decimal_ticks(end)
    for at in ticks[:: -(-len(ticks) * 70 // (width - _LEFT))]:
        parts.append(_line("grid", x(at), floor, x(at), floor + 5))
        parts.append(_text(x(at), floor + 18, f"{at:g}", "middle"))
    for name, series in (("plain", curves.plain_bytes), ("planned", curves.planned_bytes)):
        line = steps_path([(x(at), y(count)) for at, count in zip(curves.at, series)])
        area = f"{line} V{y(0):.1f} H{x(curves.at[0]):.1f} Z"
        parts.append(f'<path class="area {name}" d="{area}"/><path class="line {name}" d="{line}"/>')
    middle = x(curves.backward_at)
    parts.append(_line("divide", middle, _TOP, middle, height - _BOTTOM + 18))
    if middle - _LEFT > 70:
        parts.append(_text(middle - 8, floor + 36, "forward", "end"))
    if width - middle > 90:
        parts.append(_text(middle + 8, floor + 36, "backward"))
    if width - middle > 330:
        parts.append(_text(width - _RIGHT, floor + 36, escape(curves.axis), "end"))
    if budget_bytes is not None:
        parts.append(_line("budget", _LEFT, y(budget_bytes), width - _RIGHT, y(budget_bytes)))
    most = max((count for lane in curves.lanes.values() for count in lane), default=0) or 1
    for row, (action, lane) in enumerate(curves.lanes.items()):
        bottom = floor + _BOTTOM + row * (_LANE + _LANE_GAP) + _LANE
        name, css = LANE_NAMES.get(action, "moved"), _LANE_CLASSES.get(action, "offload")
        parts.append(_text(_LEFT - 8, bottom - 4, name, "end"))
        parts.append(_line("grid", _LEFT, bottom, width - _RIGHT, bottom))
        slice_width = (width - _LEFT - _RIGHT) / len(lane)
        for i, count in enumerate(lane):
            if count:
                tall = max(_LANE * count / most, 1.0)
                left = _LEFT + i * slice_width
                parts.append(_bar(css, left, bottom - tall, slice_width * 0.85, tall, f"{name} {format_bytes(count)}"))
    return "\n".join([*parts, "</svg>"])


def front_chart(found: TradeOff, here: tuple[int, float] | None) -> str:
    """Extra time against activation memory: lowtide's front as a line, published methods as named points.

    Args:
        here: Peak bytes and step milliseconds of the plan that the page is about, if it is about one.
    """
    return _both(lambda width: _front(found, here, width))


def _front(found: TradeOff, here: tuple[int, float] | None, width: int) -> str:
    height, floor = 360, 312.0
    series = {name: found.shares(points) for name, points in found.series().items()}
    methods = [(name, a, b) for name, points in found.classics.items() for a, b in found.shares(points)]
    plans = found.shares([] if here is None else [here])
    highest = max(
        extra for _, extra in [*(p for points in series.values() for p in points), *plans, *(m[1:] for m in methods)]
    )
    rescaled, ticks = extra_scale(max(highest, 1.0))

    def x(share: float) -> float:
        return _LEFT + share / 103 * (width - _LEFT - _RIGHT)

    def y(extra: float) -> float:
        return floor - rescaled(max(extra, 0.0)) / (1.05 * rescaled(max(highest, 1.0))) * (floor - _TOP)

    parts = [_opening(width, height, "Extra time against activation memory, by method")]
    for tick in ticks:
        parts.append(_line("grid", _LEFT, y(tick), width - _RIGHT, y(tick)))
        parts.append(_text(_LEFT - 8, y(tick) + 4, f"{tick:+g} %" if tick else "0 %", "end"))
    for fifth in range(0, 101, 20):
        parts.append(_line("grid", x(fifth), floor, x(fifth), floor + 5))
        parts.append(_text(x(fifth), floor + 18, f"{fifth} %", "middle"))
    parts.append(_text(width - _RIGHT, floor + 38, "activation memory, of the plain step's", "end"))
    curve = []
    for (name, points), css in zip(series.items(), ("planned", "moved")):
        at = [(x(share), y(extra)) for share, extra in points]
        curve += along(at, 8)
        parts.append(f'<path class="line {css}" d="M{" L".join(f"{a:.1f} {b:.1f}" for a, b in at)}"/>')
        for (a, b), (share, extra) in zip(at, points):
            parts.append(_dot(css, a, b, 3.5, f"{name}: {share:.1f} % of the activations, {extra:+.1f} % time"))
    parts += [
        f'<circle class="here" cx="{x(a):.1f}" cy="{y(b):.1f}" r="8"><title>this plan</title></circle>'
        for a, b in plans
    ]
    marks = joined([(name, x(share), y(extra)) for name, share, extra in methods], within=5)
    for name, a, b in marks:
        parts.append(_dot("method", a, b, 4.5, name))
    named = [*marks, *(("this plan", x(a), y(b)) for a, b in plans)]
    for label in placed(named, curve, size=(width, floor), letter=_LETTER, line=14):
        parts.append(_text(label.left, label.middle + 4, escape(label.text), css="label"))
    return "\n".join([*parts, "</svg>"])


def kinds_chart(by_kind: Mapping[str, Sequence[int]], divided_at: Sequence[int], limit_bytes: int) -> str:
    """What memory holds over a run, kind upon kind, the device's end as a line; steps end at those positions."""
    return _both(lambda width: _kinds(by_kind, divided_at, limit_bytes, width))


def _kinds(by_kind: Mapping[str, Sequence[int]], divided_at: Sequence[int], limit_bytes: int, width: int) -> str:
    count = len(next(iter(by_kind.values())))
    top = 1.06 * max(limit_bytes, *(sum(at) for at in zip(*by_kind.values())))
    floor, height = 286.0, 320

    def x(at: float) -> float:
        return _LEFT + at / count * (width - _LEFT - _RIGHT)

    def y(taken: float) -> float:
        return floor - taken / top * (floor - _TOP)

    parts = [_opening(width, height, "What memory holds over the run, by kind")]
    for tick in round_ticks(top):
        parts.append(_line("grid", _LEFT, y(tick), width - _RIGHT, y(tick)))
        parts.append(_text(_LEFT - 8, y(tick) + 4, _amount(tick), "end"))
    below = [0] * count
    for kind, series in by_kind.items():
        above = [a + b for a, b in zip(below, series)]
        upper = steps_path([(x(i), y(taken)) for i, taken in enumerate(above)]) + f"H{x(count):.1f}"
        lower = "".join(
            f"L{x(i + 1):.1f} {y(below[i]):.1f}L{x(i):.1f} {y(below[i]):.1f}" for i in range(count - 1, -1, -1)
        )
        parts.append(f'<path class="kind {kind}" d="{upper}{lower}Z"><title>{escape(kind)}</title></path>')
        below = above
    begins = 0
    for number, ends in enumerate([*divided_at, count], 1):
        if ends < count:
            parts.append(_line("divide", x(ends), _TOP, x(ends), floor + 8))
        if x(ends) - x(begins) > 50:
            says = f"step {number}" if number <= len(divided_at) else "after"
            parts.append(_text((x(begins) + x(ends)) / 2, floor + 20, says, "middle"))
        begins = ends
    parts.append(_line("budget", _LEFT, y(limit_bytes), width - _RIGHT, y(limit_bytes)))
    return "\n".join([*parts, "</svg>"])


def link_chart(links: Sequence[LinkUse]) -> str:
    """How busy each direction of a link is over the step."""
    return _both(lambda width: _links(links, width))


def _links(links: Sequence[LinkUse], width: int) -> str:
    left, row = 110, 46
    parts = [_opening(width, row * len(links) + 6, "How busy the links are over the step")]
    for i, link in enumerate(links):
        bottom = row * (i + 1)
        parts.append(_text(left - 8, bottom - 4, escape(f"{link.tier} {link.direction}"), "end"))
        parts.append(_line("grid", left, bottom, width - _RIGHT, bottom))
        slice_width = (width - left - _RIGHT) / len(link.shares)
        for n, share in enumerate(link.shares):
            if share:
                at = left + n * slice_width
                tall = max((row - 10) * share, 1.0)
                parts.append(_bar("offload", at, bottom - tall, slice_width * 0.85, tall, f"busy {100 * share:.0f} %"))
    return "\n".join([*parts, "</svg>"])


def _both(draw: Callable[[int], str]) -> str:
    return f'<div class="on-wide">{draw(_WIDE)}</div><div class="on-narrow">{draw(_NARROW)}</div>'


def _opening(width: int, height: int, says: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{says}">'


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    name = f' class="{css}"' if css else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _line(css: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _bar(css: str, x: float, y: float, width: float, height: float, says: str) -> str:
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{css}" {shape}><title>{escape(says)}</title></rect>'


def _dot(css: str, x: float, y: float, radius: float, says: str) -> str:
    return f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{escape(says)}</title></circle>'


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


def steps_path(points: list[tuple[float, float]]) -> str:
    """A path that holds each value until the next moment: memory does not ramp."""
    (x, y), *rest = points
    return f"M{x:.1f} {y:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in rest)
