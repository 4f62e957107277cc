"""The report as one HTML page that needs no other file, no script and no network."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from lowtide.explanation import Explanation
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.reports.breakdown import BREAKDOWNS, ActionTotals, total
from lowtide.reports.curves import Curves, memory_curves
from lowtide.reports.summary import facts, fraction, percent, warnings
from lowtide.reports.svg import front_chart, link_chart, memory_chart
from lowtide.reports.trade_off import TradeOff
from lowtide.reports.what_binds import help_sentences, peak_sentences
from lowtide.units import format_bytes
from lowtide.verifier import Verification

_CSS = Path(__file__).with_name("report.css").read_text(encoding="utf-8")


def html_report(
    plan: Plan,
    graph: StepGraph | None = None,
    verification: Verification | None = None,
    *,
    costs: Costs | None = None,
    front: TradeOff | None = None,
) -> str:
    """Return the page; memory over time is on it when ``graph`` is at hand, the trade-off when ``front`` is.

    Raises:
        PlanMismatchError: ``plan`` was made for another graph.
    """
    told = plan.explain() if plan.evidence else None
    peaks = f"{format_bytes(plan.plain_peak_bytes)} → {format_bytes(plan.predicted_peak_bytes)}"
    sections = [
        ("memory", "Memory over one step", "" if graph is None else picture(plan, graph, costs)),
        ("binds", "What binds", "" if told is None else _binds(plan, graph, told)),
        ("helps", "What would help", _sentences(help_sentences(plan, graph))),
        ("front", "The whole trade-off", "" if front is None else front_picture(front, plan)),
        ("links", "Use of the links", "" if told is None or not told.links else _link_use(plan, told)),
        *((name, f"Decisions by {name}", decisions(name, of(plan))) for name, of in BREAKDOWNS.items()),
        ("evidence", "Evidence", _evidence(plan, graph, verification)),
    ]
    items = "".join(f"<li>{escape(w)}</li>" for w in warnings(plan, verification))
    body = [
        f"<h1>Peak memory {peaks}, step time {percent(plan.predicted_overhead)}</h1>",
        f'<p class="lead">{escape(_lead(plan, graph))}</p>',
        tile_row(plan_tiles(plan, verification)),
        f'<div class="warn" role="alert"><ul>{items}</ul></div>' if items else "",
        *with_contents(sections),
    ]
    return page(peaks, body)


def page(title: str, body: Sequence[str]) -> str:
    """A whole page around ``body``."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>lowtide: {escape(title)}</title><style>{_CSS}</style>"
    )
    inside = "\n".join(part for part in body if part)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{inside}\n</main></body></html>\n'


def with_contents(sections: Sequence[tuple[str, str, str]]) -> list[str]:
    """Links to the sections that say something, and these."""
    shown = [(mark, name, inside) for mark, name, inside in sections if inside]
    links = "".join(f'<a href="#{mark}">{escape(name)}</a>' for mark, name, _ in shown)
    return [f'<nav aria-label="Contents">{links}</nav>', *(f'<h2 id="{m}">{escape(n)}</h2>\n{s}' for m, n, s in shown)]


def table(what: str, head: str, rows: Sequence[str]) -> str:
    """Rows of HTML under a row of heads, in a box that scrolls with the keyboard too."""
    label = f'tabindex="0" role="region" aria-label="{escape(what)}"'
    return f'<div class="wide" {label}><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def plain_table(what: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """``table`` of text; the first cell of each row is its head."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    lines = [
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    ]
    return table(what, f"<tr>{head}</tr>", lines)


def _lead(plan: Plan, graph: StepGraph | None) -> str:
    stored, dropped = sum(plan.counts.values()), plan.counts["recompute"]
    device = graph.device_name if graph is not None else plan.device
    return (
        f"Of {stored} tensors that autograd stores for backward, {dropped} are computed again when backward needs "
        f"them. One training step on {device}, planned by method “{plan.method}” in {plan.solve_s:.1f} s. "
        "Predicted unless it says measured."
    )


def plan_tiles(plan: Plan, verification: Verification | None = None) -> list[tuple[str, str, str]]:
    """The numbers that matter: value, name, note."""
    share = f"{100 * plan.predicted_fraction:.1f} % of plain activations"
    budget = "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    gap = "no bound known" if math.isnan(plan.gap) else f"{100 * plan.gap:.2f} %"
    step = f"{plan.predicted_step_ms:.1f} ms forward + backward"
    tiles = [
        (budget, "budget", "peak allocated, absolute"),
        (format_bytes(plan.predicted_peak_bytes), "predicted peak", share),
        (percent(plan.predicted_overhead), "predicted step time", step),
        (gap, "from the time bound", "no plan within the budget is faster than the bound"),
    ]
    if verification is not None:
        if (peak := verification.measured_peak_bytes) is not None:
            share = f"{100 * fraction(plan, peak):.1f} % of plain activations"
            tiles.append((format_bytes(peak), "measured peak", share))
        if not math.isnan(verification.overhead):
            overhead = percent(verification.overhead)
            tiles.append((overhead, "measured step time", "beside the plain step, in one process"))
    return tiles


def tile_row(tiles: Sequence[tuple[str, str, str]]) -> str:
    """Numbers side by side: value, name, note."""
    cells = [
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(v)}</b><span>{escape(note)}</span></div>'
        for v, name, note in tiles
    ]
    return f'<div class="tiles">{"".join(cells)}</div>'


def picture(plan: Plan, graph: StepGraph, costs: Costs | None) -> str:
    """Memory over the step, and its legend."""
    curves = memory_curves(graph, plan, costs)
    legend = '<i class="swatch-plain"></i>plain step<i class="save"></i>under the plan'
    if plan.budget_bytes is not None:
        legend += '<i class="swatch-budget"></i>budget'
    chart = memory_chart(curves, plan.budget_bytes)
    note = (
        "Below the curves: bytes of the tensors that are saved, recomputed or moved, where forward makes them and, "
        "if they go, where backward first brings them back."
    )
    return (
        f'<p class="legend">{legend}</p>\n{chart}\n<p class="note">{_in_words(plan, curves)} '
        f"Across: {escape(curves.axis)}. {note}</p>"
    )


def _in_words(plan: Plan, curves: Curves) -> str:
    """The picture for those who do not see it."""
    plain, planned = (series.index(max(series)) for series in (curves.plain_bytes, curves.planned_bytes))
    return (
        f"The plain step's peak of {format_bytes(plan.plain_peak_bytes)} is at {curves.at[plain]:.4g} of "
        f"{curves.at[-1]:.4g}, the planned one's of {format_bytes(plan.predicted_peak_bytes)} at "
        f"{curves.at[planned]:.4g}; backward begins at {curves.backward_at:.4g}."
    )


def _sentences(found: Sequence[str]) -> str:
    return f'<ul class="say">{"".join(f"<li>{escape(text)}</li>" for text in found)}</ul>' if found else ""


def _binds(plan: Plan, graph: StepGraph | None, told: Explanation) -> str:
    """Sentences, then what fills memory at the peak as a table with headings."""
    rows = [("live before the step", 0, "weights, optimizer, batch, gradients that add up", "", told.resident_bytes)]
    rows += [(h.kind, h.count, h.module, h.op, h.bytes) for h in told.holders]
    rows += (
        [("others", 0, "smaller holders, workspace, generator state", "", told.other_bytes)] if told.other_bytes else []
    )
    peak = max(told.peak_bytes, 1)
    cells = [
        f'<tr><td class="text">{escape(kind)}</td><td class="text">{escape(module)}</td>'
        f'<td class="text n">{escape(op)}</td><td class="n">{count or "–"}</td><td>{format_bytes(size)}</td>'
        f"<td>{100 * size / peak:.0f} %</td></tr>"
        for kind, count, module, op, size in rows
    ]
    heads = (
        '<tr><th scope="col" class="text">state</th><th scope="col" class="text">module</th>'
        '<th scope="col" class="text n">operator</th><th scope="col" class="n">tensors</th>'
        '<th scope="col">bytes</th><th scope="col">of the peak</th></tr>'
    )
    what = "What fills memory at the peak"
    return f"{_sentences(peak_sentences(plan, graph))}\n<h3>{what}</h3>\n{table(what, heads, cells)}"


def front_picture(front: TradeOff, plan: Plan | None = None) -> str:
    """The trade-off, ``plan``'s place in it, and the same as a table."""
    legend = '<i class="save"></i>lowtide'
    legend += '<i class="offload"></i>lowtide, moving to another tier' if front.moving else ""
    legend += '<i class="swatch-method"></i>published methods' if front.classics else ""
    legend += '<i class="swatch-here"></i>this plan' if plan is not None else ""
    chart = front_chart(front, None if plan is None else (plan.predicted_peak_bytes, plan.predicted_step_ms))
    points = [(name, *point) for name, line in front.series().items() for point in line]
    points += [(name, *point) for name, line in front.classics.items() for point in line]
    rows = []
    for name, size, ms in sorted(points, key=lambda p: (-p[1], p[2])):
        ((share, extra),) = front.shares([(size, ms)])
        rows.append((name, format_bytes(size), f"{share:.1f} %", f"{extra:+.1f} %"))
    numbers = plain_table("The same as numbers", ("method", "peak", "of plain activations", "time"), rows)
    left_out = _sentences([f"Left out: {why}" for why in front.left_out.values()])
    return f'<p class="legend">{legend}</p>\n{chart}\n{numbers}{left_out}'


def _link_use(plan: Plan, told: Explanation) -> str:
    rows = [
        (f"{at.tier} {at.direction}", format_bytes(at.bytes), f"{at.busy_ms:.1f} ms", f"{at.waited_ms:.1f} ms")
        for at in told.links
    ]
    heads = ("link", "bytes", "busy", "the step waits")
    return f"{link_chart(told.links)}\n{plain_table('Use of the links', heads, rows)}"


def decisions(what: str, groups: tuple[ActionTotals, ...]) -> str:
    """A table with a row for each group."""
    largest = max((g.bytes for g in groups), default=0) or 1
    kinds = [("save", "saved"), ("recompute", "recomputed")]
    kinds += [("other", "moved")] if any(g.other_count for g in groups) else []
    columns = "".join(
        f'<th scope="col" class="n">tensors {name}</th><th scope="col">bytes {name}</th>' for _, name in kinds
    )
    head = (
        f'<tr><th scope="col" class="text">{what}</th><th scope="col" class="text">size</th>{columns}'
        '<th scope="col">replay time</th></tr>'
    )
    rows = [_row(g, kinds, largest) for g in groups]
    legend = "".join(f'<i class="{_CLASSES[kind]}"></i>{name}' for kind, name in kinds)
    if len(groups) > 1:
        rows.append(_row(total("all", groups), kinds, 0))
    return f'<p class="legend">{legend}</p>\n{table(f"Decisions by {what}", head, rows)}'


_CLASSES = {"save": "save", "recompute": "recompute", "other": "offload"}


def _row(group: ActionTotals, kinds: list[tuple[str, str]], largest: int) -> str:
    cells, stack = [], []
    for kind, _ in kinds:
        count, size = getattr(group, f"{kind}_count"), getattr(group, f"{kind}_bytes")
        cells.append(f'<td class="n">{count or "–"}</td><td>{format_bytes(size) if count else "–"}</td>')
        if largest and size:
            stack.append(f'<i class="{_CLASSES[kind]}" style="width:{100 * size / largest:.1f}%"></i>')
    bar = f'<td><div class="stack">{"".join(stack)}</div></td>'
    ms = f"{group.recompute_ms:.1f} ms" if group.recompute_ms else "–"
    css = "" if largest else ' class="all"'
    return f'<tr{css}><th scope="row">{escape(group.name)}</th>{bar}{"".join(cells)}<td>{ms}</td></tr>'


def _evidence(plan: Plan, graph: StepGraph | None, verification: Verification | None) -> str:
    rows = [
        ("plain step", f"{format_bytes(plan.plain_peak_bytes)} peak, {plan.plain_step_ms:.1f} ms"),
        ("planned step", f"{format_bytes(plan.predicted_peak_bytes)} peak, {plan.predicted_step_ms:.1f} ms"),
        *facts(plan, graph, verification),
        ("status", plan.status),
        ("graph", plan.graph_fingerprint),
        *plan.provenance.items(),
    ]
    return f"<dl>{''.join(f'<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>' for k, v in rows)}</dl>"
