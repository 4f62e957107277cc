"""Memory over time as a picture file: the plain step, the planned one, and the budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.errors import LowtideError
from lowtide.graph.costs import Costs
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.reports.curves import memory_curves
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLAIN, PLANNED, BUDGET, MOVED = "#8a8f98", "#0b7285", "#c92a2a", "#6741d9"


def plot_memory(graph: StepGraph, plan: Plan, path: str | Path, *, costs: Costs | None = None) -> None:
    """Write the plot to ``path``; the suffix (.png, .svg, .pdf) says how.

    Raises:
        LowtideError: matplotlib is not installed, or it cannot write that kind of file.
        PlanMismatchError: ``plan`` was made for another graph.
    """
    with axes_at(path, (9, 4.2)) as axes:
        curves = memory_curves(graph, plan, costs)
        top = max(*curves.plain_bytes, *curves.planned_bytes, plan.budget_bytes or 0)
        scale, unit = next((s, u) for s, u in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")) if top >= s)
        plain = [count / scale for count in curves.plain_bytes]
        planned = [count / scale for count in curves.planned_bytes]

        axes.fill_between(curves.at, plain, step="post", color=PLAIN, alpha=0.18, linewidth=0)
        label = f"plain, {format_bytes(plan.plain_peak_bytes)}"
        axes.step(curves.at, plain, where="post", color=PLAIN, linewidth=1.2, label=label)
        axes.fill_between(curves.at, planned, step="post", color=PLANNED, alpha=0.28, linewidth=0)
        predicted = (
            f"planned, {format_bytes(plan.predicted_peak_bytes)} for {100 * plan.predicted_overhead:+.1f} % time"
        )
        axes.step(curves.at, planned, where="post", color=PLANNED, linewidth=1.4, label=predicted)
        if plan.budget_bytes is not None:
            budget = f"budget, {format_bytes(plan.budget_bytes)}"
            axes.axhline(plan.budget_bytes / scale, color=BUDGET, linewidth=1, linestyle=(0, (5, 3)), label=budget)
        axes.axvline(curves.backward_at, color="black", linewidth=0.6, alpha=0.5)
        axes.annotate(
            "  backward", (curves.backward_at, 0.02), xycoords=("data", "axes fraction"), fontsize=8, alpha=0.7
        )
        axes.set(xlabel=curves.axis, ylabel=f"allocated, {unit}", xlim=(0, curves.at[-1]), ylim=(0, top / scale * 1.05))
        axes.grid(axis="y", linewidth=0.4, alpha=0.4)


@contextmanager
def axes_at(path: str | Path, inches: tuple[float, float], legend_columns: int = 3) -> Iterator[Axes]:
    """Empty axes; their picture is written to ``path`` at the end of the block, with a legend above. Its suffix (.png,
    .svg, .pdf) says how.

    Raises:
        LowtideError: matplotlib is not installed, or it cannot write that kind of file there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LowtideError(
            f"cannot draw {path}: matplotlib is not installed ({error}).\nInstall it with: pip install 'lowtide[plots]'"
        ) from error
    figure = Figure(figsize=inches, dpi=150, layout="constrained")
    axes = figure.add_subplot()
    yield axes
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=legend_columns, frameon=False, fontsize=9)
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise LowtideError(f"cannot write the plot to {path}: {error}.\nName a writable .png, .svg or .pdf.") from error
