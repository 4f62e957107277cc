"""The report as one HTML page that needs no other file, no script and no network."""

import math
from html import escape
from pathlib import Path

from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.reports.curves import memory_curves
from lowtide.reports.summary import ActionTotals, by_module, by_op, facts, fraction, percent, total, warnings
from lowtide.reports.svg import memory_chart
from lowtide.units import format_bytes
from lowtide.verifier import Verification

_CSS = Path(__file__).with_name("report.css").read_text(encoding="utf-8")


def html_report(
    plan: Plan,
    graph: StepGraph | None = None,
    verification: Verification | None = None,
    *,
    costs: Costs | None = None,
) -> str:
    """Return the page; memory over time is on it when ``graph`` is at hand.

    Raises:
        PlanMismatchError: ``plan`` was made for another graph.
    """
    title = f"{format_bytes(plan.plain_peak_bytes)} → {format_bytes(plan.predicted_peak_bytes)}"
    items = "".join(f"<li>{escape(w)}</li>" for w in warnings(plan, verification))
    body = [
        f"<h1>Peak memory {title}, step time {percent(plan.predicted_overhead)}</h1>",
        f'<p class="lead">{escape(_lead(plan, graph))}</p>',
        _tiles(plan, verification),
        f'<div class="warn"><ul>{items}</ul></div>' if items else "",
        "" if graph is None else _picture(plan, graph, costs),
        f"<h2>What binds</h2>\n<pre>{escape(str(plan.explain()))}</pre>" if plan.evidence else "",
        "<h2>Decisions by module</h2>",
        _table("module", by_module(plan)),
        "<h2>Decisions by operator</h2>",
        _table("operator", by_op(plan)),
        "<h2>Evidence</h2>",
        _evidence(plan, graph, verification),
    ]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>lowtide: {title}</title><style>{_CSS}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _lead(plan: Plan, graph: StepGraph | None) -> str:
    stored, dropped = sum(plan.counts.values()), plan.counts["recompute"]
    device = graph.device_name if graph is not None else plan.device
    return (
        f"Of {stored} tensors that autograd stores for backward, {dropped} are computed again when backward needs "
        f"them. One training step on {device}, planned by method “{plan.method}” in {plan.solve_s:.1f} s. "
        "Predicted unless it says measured."
    )


def _tiles(plan: Plan, verification: Verification | None) -> str:
    share = f"{100 * plan.predicted_fraction:.1f} % of plain activations"
    budget = "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    gap = "no bound known" if math.isnan(plan.gap) else f"{plan.gap:.2%}"
    step = f"{plan.predicted_step_ms:.1f} ms forward + backward"
    tiles = [
        (budget, "budget", "peak allocated, absolute"),
        (format_bytes(plan.predicted_peak_bytes), "predicted peak", share),
        (percent(plan.predicted_overhead), "predicted step time", step),
        (gap, "from the time bound", "no plan within the budget is faster than the bound"),
    ]
    if verification is not None:
        share = f"{100 * fraction(plan, verification.measured_peak_bytes):.1f} % of plain activations"
        tiles.append((format_bytes(verification.measured_peak_bytes), "measured peak", share))
        if not math.isnan(verification.overhead):
            overhead = percent(verification.overhead)
            tiles.append((overhead, "measured step time", "beside the plain step, in one process"))
    cells = [
        f'<div class="tile"><span>{name}</span><b>{escape(v)}</b><span>{note}</span></div>' for v, name, note in tiles
    ]
    across = len(tiles) if len(tiles) < 5 else 3
    return f'<div class="tiles" style="grid-template-columns: repeat({across}, 1fr)">{"".join(cells)}</div>'


def _picture(plan: Plan, graph: StepGraph, costs: Costs | None) -> str:
    legend = '<i class="swatch-plain"></i>plain step<i class="save"></i>under the plan'
    if plan.budget_bytes is not None:
        legend += '<i class="swatch-budget"></i>budget'
    chart = memory_chart(memory_curves(graph, plan, costs), plan.budget_bytes)
    return f'<h2>Memory over one step</h2>\n<p class="legend">{legend}</p>\n{chart}'


def _table(what: str, groups: tuple[ActionTotals, ...]) -> str:
    largest = max((g.bytes for g in groups), default=0) or 1
    offload = any(g.other_count for g in groups)
    names = ["save", "recompute", *(["offload"] if offload else [])]
    spans = "".join(f"<th colspan=2>{name}</th>" for name in names)
    head = f"<tr><th>{what}</th><th>size</th>{spans}<th>replay</th></tr>"
    rows = [_row(g, names, largest) for g in groups]
    legend = "".join(f'<i class="{name}"></i>{name}' for name in names)
    if len(groups) > 1:
        rows.append(_row(total("all", groups), names, 0))
    return f'<p class="legend">{legend}</p>\n<div class="wide"><table>{head}{"".join(rows)}</table></div>'


def _row(group: ActionTotals, names: list[str], largest: int) -> str:
    kinds = {"save": "save", "recompute": "recompute", "offload": "other"}
    cells, stack = [], []
    for name in names:
        count, size = getattr(group, f"{kinds[name]}_count"), getattr(group, f"{kinds[name]}_bytes")
        cells.append(f"<td>{count}</td><td>{format_bytes(size)}</td>" if count else "<td>–</td><td></td>")
        if largest and size:
            stack.append(f'<i class="{name}" style="width:{100 * size / largest:.1f}%"></i>')
    bar = f'<td><div class="stack">{"".join(stack)}</div></td>'
    ms = f"{group.recompute_ms:.1f} ms" if group.recompute_ms else "–"
    css = "" if largest else ' class="all"'
    return f"<tr{css}><td>{escape(group.name)}</td>{bar}{''.join(cells)}<td>{ms}</td></tr>"


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
