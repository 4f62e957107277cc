"""``fit_report``: what was decided, predicted and measured, as plain text at most 100 columns wide.

No colour and no box drawing: the report is pasted into issues and read through pipes.
"""

import textwrap
from collections.abc import Sequence

from lowtide.explanation import shorten
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import ALLOCATED, Plan
from lowtide.reports.breakdown import BREAKDOWNS, ActionTotals, total
from lowtide.reports.summary import TrainingCounts, facts, fraction, overhead_text, percent
from lowtide.reports.summary import warnings as own_warnings
from lowtide.reports.what_binds import help_sentences
from lowtide.units import format_bytes
from lowtide.verifier import Verification

WIDTH = 100
_GROUP_ROWS = 12
_NAME_WIDTH = 40


def fit_report(
    plan: Plan,
    graph: StepGraph | None = None,
    verification: Verification | None = None,
    counts: TrainingCounts | None = None,
    *,
    warnings: Sequence[str] = (),
    by: Sequence[str] = ("module", "operator"),
) -> str:
    """Return the report on one plan.

    Args:
        plan: Decisions and their evidence; enough for everything but the parts of resident memory.
        graph: The traced step, if at hand: names the device and what lives through the whole step.
        verification: What comparing with the plain step showed.
        counts: What the tape met in training.
        warnings: More of them, one line each.
        by: What decisions are grouped by: some of ``BREAKDOWNS``.
    """
    device = graph.device_name if graph is not None else plan.device
    status = {"optimal": "optimal", "feasible": "best found", "fixed": "fixed rule"}.get(plan.status, plan.status)
    blocks = [
        f"lowtide: method {plan.method} ({status}), solved in {plan.solve_s:.1f} s, on {device}",
        _peaks(plan, verification),
        "\n".join(line for row in facts(plan, graph, verification, counts) for line in _wrapped(*row)),
        *(_groups(f"by {name}", BREAKDOWNS[name](plan)) for name in by),
    ]
    if plan.evidence:
        blocks.append(str(plan.explain()))
    if graph is not None and (helpful := help_sentences(plan, graph)):
        blocks.append("\n".join(["what would help", *(line for text in helpful for line in _wrapped("  -", text, 4))]))
    found = [*own_warnings(plan, verification, counts), *warnings]
    if found:
        blocks.append("\n".join(["warnings", *(line for text in found for line in _wrapped("  -", text, indent=4))]))
    return "\n\n".join(blocks)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equal length as aligned lines: the first column to the left, the rest to the right."""
    first, *others = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for name, *cells in rows:
        lines.append("  ".join([name.ljust(first), *map(str.rjust, cells, others)]).rstrip())
    return lines


def _peaks(plan: Plan, verification: Verification | None) -> str:
    def row(name: str, peak: int | None, step: str = "", overhead: str = "") -> list[str]:
        if peak is None:
            return [name, "-", "-", step, overhead]
        return [name, format_bytes(peak), f"{100 * fraction(plan, peak):.1f} %", step, overhead]

    rows = [["", "peak", "activations", "step", "overhead"]]
    rows.append(row("plain", plan.plain_peak_bytes, f"{plan.plain_step_ms:.1f} ms"))
    if verification is not None:
        rows.append(row("plain, measured", verification.plain_peak_bytes))
    rows.append(row("budget" if plan.budget_kind == ALLOCATED else "budget, reserved", plan.budget_bytes))
    overhead = percent(plan.predicted_overhead)
    rows.append(row("predicted", plan.predicted_peak_bytes, f"{plan.predicted_step_ms:.1f} ms", overhead))
    if verification is not None:
        rows.append(row("measured", verification.measured_peak_bytes, "", overhead_text(verification)))
    return "\n".join(columns(rows))


def _wrapped(name: str, text: str, indent: int = 19) -> list[str]:
    """``text`` beside ``name``, as many lines as it takes."""
    lines = textwrap.wrap(text, WIDTH - indent) or [""]
    return [f"{name:<{indent - 1}} {lines[0]}".rstrip(), *(" " * indent + line for line in lines[1:])]


def _groups(title: str, groups: tuple[ActionTotals, ...]) -> str:
    offload = any(g.other_count for g in groups)
    shown = list(groups)
    if len(groups) > _GROUP_ROWS + 1:
        rest = groups[_GROUP_ROWS:]
        shown = [*groups[:_GROUP_ROWS], total(f"{len(rest)} more", rest)]
    if len(groups) > 1:
        shown.append(total("all", groups))
    head = [title.ljust(_NAME_WIDTH), "save", "", "recompute", ""]  # wide, so that both tables line up
    head += ["offload", "", "replay"] if offload else ["replay"]
    return "\n".join(columns([head, *(_row(g, offload) for g in shown)]))


def _row(group: ActionTotals, offload: bool) -> list[str]:
    amounts = [(group.save_count, group.save_bytes), (group.recompute_count, group.recompute_bytes)]
    amounts += [(group.other_count, group.other_bytes)] if offload else []
    cells = [cell for count, size in amounts for cell in ((str(count), format_bytes(size)) if count else ("-", ""))]
    ms = f"{group.recompute_ms:.1f} ms" if group.recompute_ms else "-"
    return [shorten(group.name, _NAME_WIDTH - 8 * offload), *cells, ms]
