"""Fits, plans and fronts as a notebook shows them: HTML fragments without scripts, style sheets or other files.

Every style is an attribute, so nothing leaks into the page around, and viewers that strip style sheets show the same.
Text and rules take the page's ink, the other colours read on light and on dark.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.reports.breakdown import by_module
from lowtide.reports.html import decisions, front_picture, picture, plan_tiles, tile_row
from lowtide.reports.summary import percent, warnings
from lowtide.reports.trade_off import TradeOff
from lowtide.solvers.pareto_front import FrontierPoint
from lowtide.units import format_bytes

_SAVE, _RECOMPUTE, _OFFLOAD, _PLAIN, _BUDGET = "#1098ad", "#e8890c", "#8b5cf6", "#8a939d", "#e03131"
_SWATCH = "display:inline-block;width:10px;height:10px;margin:0 5px 0 10px;background:"
_FILLS = {"save": _SAVE, "recompute": _RECOMPUTE, "offload": _OFFLOAD}
# By tag and classes, else by tag alone: what ``report.css`` says for a page.
_STYLES: Mapping[str, str] = {
    "h4": "margin:4px 0 10px;font-size:15px;font-weight:600",
    "div tiles": "display:flex;flex-wrap:wrap;gap:10px;margin:0 0 10px",
    "div tile": "flex:1 1 150px;border:1px solid rgba(128,128,128,.35);border-radius:8px;padding:8px 12px",
    "div wide": "overflow:auto;max-height:300px",
    "div stack": "display:flex;height:10px;min-width:90px",
    "b": "display:block;font-size:18px;line-height:1.3",
    "span": "display:block;font-size:12px;opacity:.75",
    "p legend": "font-size:12px;margin:6px 0", "p note": "font-size:12px;opacity:.75;margin:6px 0",
    "ul": "margin:6px 0;padding-left:18px;font-size:13px",
    "summary": "font-size:13px;cursor:pointer", 
    "svg": "display:block;overflow:visible;width:100%;max-width:760px;height:auto",
    "text": "fill:currentColor;font-size:13px;opacity:.8", "text label": "fill:currentColor;font-size:14px",
    "line grid": "stroke:currentColor;opacity:.2", "line divide": "stroke:currentColor;opacity:.6;stroke-dasharray:2 4",
    "line budget": f"stroke:{_BUDGET};stroke-width:1.5;stroke-dasharray:7 4",
    "path line plain": f"fill:none;stroke-width:1.5;stroke:{_PLAIN}",
    "path line planned": f"fill:none;stroke-width:1.5;stroke:{_SAVE}",
    "path line moved": f"fill:none;stroke-width:1.5;stroke:{_OFFLOAD}",
    "path area plain": f"fill:{_PLAIN};opacity:.28", "path area planned": f"fill:{_SAVE};opacity:.28",
    "circle planned": f"fill:{_SAVE}", "circle moved": f"fill:{_OFFLOAD}", "circle method": f"fill:{_PLAIN}",
    **{f"rect {name}": f"fill:{fill}" for name, fill in _FILLS.items()},
    **{f"i {name}": f"{_SWATCH}{fill}" for name, fill in _FILLS.items()},
    "i swatch-plain": f"{_SWATCH}{_PLAIN}", "i swatch-method": f"{_SWATCH}{_PLAIN};border-radius:5px",
    "i swatch-budget": f"{_SWATCH}none;border-top:2px dashed {_BUDGET};height:0;width:18px;vertical-align:4px",
    "table": "border-collapse:collapse;font-size:12px;width:100%",
    "th": "text-align:right;padding:3px 8px;font-weight:600", "td": "text-align:right;padding:3px 8px",
    "th text": "text-align:left;padding:3px 8px;font-weight:600",
}  # fmt: skip
_NARROW = re.compile(r'<div class="on-narrow">.*?</svg></div>', re.DOTALL)
_TAG = re.compile(r"<(\w+)([^>]*)>")


def card(
    title: str, tiles: Sequence[tuple[str, str, str]], inside: Sequence[str] = (), notes: Sequence[str] = ()
) -> str:
    """One thing as a fragment of a page.

    Args:
        tiles: Value, name, note.
        inside: HTML.
        notes: Lines of text below.
    """
    lines = "".join(f"<li>{escape(line)}</li>" for line in notes)
    parts = [f"<h4>{escape(title)}</h4>", tile_row(tiles), *inside, f"<ul>{lines}</ul>" if lines else ""]
    frame = "max-width:820px;margin:6px 0;font-family:system-ui,sans-serif;line-height:1.45"
    return f'<div style="{frame}">{_styled("".join(parts))}</div>'


def plan_html(plan: Plan, graph: StepGraph | None = None, costs: Costs | None = None) -> str:
    """Peak and time, what is decided, and memory over the step where ``graph`` is at hand."""
    peaks = f"{format_bytes(plan.plain_peak_bytes)} → {format_bytes(plan.predicted_peak_bytes)}"
    by = decisions("module", by_module(plan))
    inside = [] if graph is None else [picture(plan, graph, costs)]
    inside.append(f"<details><summary>Decisions by module</summary>{by}</details>")
    title = f"Plan: peak {peaks}, step time {percent(plan.predicted_overhead)}"
    return card(title, plan_tiles(plan), inside, warnings(plan))


def frontier_html(front: Sequence[FrontierPoint]) -> str:
    """Extra time against activation memory, and the points as a table."""
    if not front:
        return card("Trade-off: no points", [])
    least, most = front[0], front[-1]
    tiles = [
        (format_bytes(p.peak_bytes), name, f"step time {percent(p.plan.predicted_overhead)}")
        for p, name in ((least, "least peak"), (most, "largest peak"))
    ]
    found = TradeOff(list(front), {})
    return card(f"Trade-off: {len(front)} plans", tiles, [front_picture(found)])


def _styled(html: str) -> str:
    """``html`` with style attributes for its classes; of charts that are there twice, the wide one."""

    def attribute(match: re.Match) -> str:
        tag, rest = match[1], match[2]
        names, rest = _taken("class", rest)
        own, rest = _taken("style", rest)
        found = (_STYLES[key] for key in (f"{tag} {names}", f"{tag} {names.split(' ')[0]}", tag) if key in _STYLES)
        style = ";".join(part for part in (next(found, ""), own) if part)
        return f'<{tag} style="{style}"{rest}>' if style else f"<{tag}{rest}>"

    return _TAG.sub(attribute, _NARROW.sub("", html))


def _taken(name: str, attributes: str) -> tuple[str, str]:
    """The value of one attribute, and the others."""
    found = re.search(rf' {name}="([^"]*)"', attributes)
    return (found[1], attributes.replace(found[0], "")) if found else ("", attributes)
