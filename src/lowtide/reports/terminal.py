"""``fit_report``: what was decided, predicted and measured, as plain text at most 100 columns wide.

No colour and no box drawing: the report is pasted into issues and read through pipes.
"""

import math
import textwrap
from collections.abc import Sequence

from lowtide.explanation import shorten
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.reports.summary import (
    ActionTotals,
    TrainingCounts,
    by_module,
    by_op,
    checks,
    fraction,
    kept_for_replays,
    overhead_text,
    percent,
)
from lowtide.reports.summary import warnings as own_warnings
from lowtide.units import format_bytes
from lowtide.verifier import Verification

WIDTH = 100
_GROUP_ROWS = 12
_NAME_WIDTH = 40
_TAPED = {
    "model": "the model's own calls; what runs outside them is saved",
    "step": "the whole step, the loss outside the model too",
}


def fit_report(
    plan: Plan,
    graph: StepGraph | None = None,
    verification: Verification | None = None,
    counts: TrainingCounts | None = None,
    *,
    warnings: Sequence[str] = (),
) -> str:
    """Return the report on one plan.

    Args:
        plan: Decisions and their evidence; enough for everything but the parts of resident memory.
        graph: The traced step, if at hand: names the device and what lives through the whole step.
        verification: What comparing with the plain step showed.
        counts: What the tape met in training.
        warnings: More of them, one line each.
    """
    blocks = [_headline(plan, graph), _peaks(plan, verification), _facts(plan, graph, verification, counts)]
    blocks.append(_groups("by module", by_module(plan)))
    blocks.append(_groups("by operator", by_op(plan)))
    if plan.evidence:
        blocks.append(str(plan.explain()))
    found = [*own_warnings(plan, verification, counts), *warnings]
    if found:
        blocks.append("\n".join(["warnings", *(line for text in found for line in _wrapped("  -", text, indent=4))]))
    return "\n\n".join(blocks)


def columns(rows: Sequence[Sequence[str]], left: int = 1, gap: str = "  ") -> list[str]:
    """Rows of equal length as aligned lines: the first ``left`` columns to the left, the rest to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [text.ljust(w) if i < left else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths))]
        lines.append(gap.join(cells).rstrip())
    return lines


def _headline(plan: Plan, graph: StepGraph | None) -> str:
    device = graph.device_name if graph is not None else plan.device
    status = {"optimal": "optimal", "feasible": "best found", "fixed": "fixed rule"}.get(plan.status, plan.status)
    return f"lowtide: method {plan.method} ({status}), solved in {plan.solve_s:.1f} s, on {device}"


def _peaks(plan: Plan, verification: Verification | None) -> str:
    def row(name: str, peak: int | None, step: str = "", overhead: str = "") -> list[str]:
        if peak is None:
            return [name, "-", "-", step, overhead]
        return [name, format_bytes(peak), f"{100 * fraction(plan, peak):.1f} %", step, overhead]

    rows = [["", "peak", "activations", "step", "overhead"]]
    rows.append(row("plain", plan.plain_peak_bytes, f"{plan.plain_step_ms:.1f} ms"))
    if verification is not None:
        rows.append(row("plain, measured", verification.plain_peak_bytes))
    rows.append(row("budget", plan.budget_bytes))
    overhead = percent(plan.predicted_overhead)
    rows.append(row("predicted", plan.predicted_peak_bytes, f"{plan.predicted_step_ms:.1f} ms", overhead))
    if verification is not None:
        rows.append(row("measured", verification.measured_peak_bytes, "", overhead_text(verification)))
    return "\n".join(columns(rows))


def _facts(
    plan: Plan, graph: StepGraph | None, verification: Verification | None, counts: TrainingCounts | None
) -> str:
    rows = []
    if plan.bound_ms is None:
        rows.append(("time bound", "none known for this method"))
    elif math.isnan(plan.gap):
        rows.append(("time bound", f"{plan.bound_ms:.1f} ms"))
    else:
        rows.append(("time bound", f"no plan within the budget is under {plan.bound_ms:.1f} ms; gap {plan.gap:.2%}"))
    by_action = {action: count for action, count in plan.counts.items() if count}
    amounts = plan.bytes_by_action
    decided = [f"{action} {count} ({format_bytes(amounts[action])})" for action, count in by_action.items()]
    rows.append(("storages", ", ".join(decided) or "the step stores nothing for backward"))
    kept, kept_bytes = kept_for_replays(plan)
    if kept:
        rows.append(("for replays alone", f"save {kept} ({format_bytes(kept_bytes)})"))
    resident = format_bytes(plan.resident_bytes)
    if graph is not None:
        parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in graph.resident.items() if count)
        resident = f"{resident}: {parts}" if parts else resident
    rows.append(("before the step", resident))
    if graph is not None and graph.optimizer_step_bytes:
        rows.append(
            ("optimizer.step()", f"{format_bytes(graph.optimizer_step_bytes)} more for a moment, beside the peak")
        )
    rows.append(("taped", _TAPED.get(plan.region, plan.region)))
    rows.extend(checks(verification, counts))
    return "\n".join(line for name, text in rows for line in _wrapped(name, text))


def _wrapped(name: str, text: str, indent: int = 19) -> list[str]:
    """``text`` beside ``name``, as many lines as it takes."""
    lines = textwrap.wrap(text, WIDTH - indent) or [""]
    return [f"{name:<{indent - 1}} {lines[0]}".rstrip(), *(" " * indent + line for line in lines[1:])]


def _groups(title: str, groups: tuple[ActionTotals, ...]) -> str:
    shown, rest = groups[:_GROUP_ROWS], groups[_GROUP_ROWS:]
    if len(rest) == 1:
        shown, rest = groups, ()
    offload = any(g.other_count for g in groups)
    head = [title, "save", "", "recompute", "", *(["offload", ""] if offload else []), "replay"]
    rows = [head, *(_group_row(g.name, [g], offload) for g in shown)]
    if rest:
        rows.append(_group_row(f"{len(rest)} more", list(rest), offload))
    if len(groups) > 1:
        rows.append(_group_row("all", list(groups), offload))
    rows[0][0] = title.ljust(_NAME_WIDTH)  # both tables line up
    return "\n".join(columns(rows))


def _group_row(name: str, groups: list[ActionTotals], offload: bool) -> list[str]:
    def amount(kind: str) -> list[str]:
        count = sum(getattr(g, f"{kind}_count") for g in groups)
        size = sum(getattr(g, f"{kind}_bytes") for g in groups)
        return [str(count), format_bytes(size)] if count else ["-", ""]

    kinds = ["save", "recompute", *(["other"] if offload else [])]
    ms = sum(g.recompute_ms for g in groups)
    amounts = [cell for kind in kinds for cell in amount(kind)]
    return [shorten(name, _NAME_WIDTH - 8 * offload), *amounts, f"{ms:.1f} ms" if ms else "-"]
