"""``lowtide bench``: the trade-off of a user's own step, measured: published methods and exact plans side by side."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.commands.files import check_folders
from lowtide.commands.verbs import add_target, add_verb
from lowtide.errors import BudgetInfeasibleError
from lowtide.scripts import BadUsageError, load_step

if TYPE_CHECKING:
    from lowtide.graph.costs import Costs
    from lowtide.graph.step_graph import StepGraph
    from lowtide.side_by_side import Row, Way

BUDGETS = ("75%", "60%", "50%", "40%", "25%")
_CLASSICS: dict[str, dict[str, Any]] = {
    "every 2nd layer": {"method": "every_n", "n": 2},
    "every 4th layer": {"method": "every_n", "n": 4},
    "sqrt": {"method": "sqrt_n"},
    "full": {"method": "full"},
    "selective": {"method": "selective"},
}
_SAC = "torch selective"
# Matrix products without and with a bias, and attention: what PyTorch's own examples keep.
_SAC_OPS = ("mm", "addmm", "bmm", *(
    f"_scaled_dot_product_{kind}" for kind in
    ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
))  # fmt: skip


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs, "bench", run, "methods side by side on your step: the trade-off table, measured",
        "Measure your step under the published methods and under exact plans at several budgets.",
        "example:\n  lowtide bench train.py:setup --plot trade_off.png",
    )  # fmt: skip
    add_target(parser)
    parser.add_argument("--plot", metavar="F.png", type=Path, help="draw peak against time as .png, .svg or .pdf")


@dataclass(frozen=True)
class Bench:
    """Measured rows, and what could not be measured, with the reason."""

    rows: tuple[Row, ...]
    left_out: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Plain types."""
        return {"rows": [asdict(row) for row in self.rows], "left_out": self.left_out}

    def __str__(self) -> str:
        from lowtide.reports.terminal import columns
        from lowtide.side_by_side import HEAD

        lines = columns([HEAD, *(row.cells for row in self.rows)])
        reasons = [f"{name}: left out: {why}" for name, why in self.left_out.items()]
        return "\n".join(
            [*lines, *([""] if reasons else []), *(line for r in reasons for line in textwrap.wrap(r, 100))]
        )


def run(args: argparse.Namespace) -> tuple[int, str, dict[str, Any]]:
    """Exit code, text and JSON of the verb."""
    check_folders(args.plot)
    model, batch, step = load_step(args.target)
    found = bench(model, batch, step)
    if args.plot:
        plot(found, args.plot)
    equal = all(row.bitwise_equal for row in found.rows)
    return (0 if equal else 1), str(found), {"status": "ok" if equal else "finding", **found.as_json()}


def bench(model: Any, batch: Any, step: Any) -> Bench:
    """Measure the step under every method that applies to it."""
    from lowtide.measurement.op_times import measure
    from lowtide.reports.progress import counting, stages
    from lowtide.settings.settings_plan import without_checkpointing
    from lowtide.side_by_side import PLAIN, SideBySide, Way
    from lowtide.tracing.sources import trace

    left_out: dict[str, str] = {}
    with without_checkpointing(model):
        with stages("tracing and measuring", "planning") as next_stage:
            graph = trace(model, batch, step=step)
            costs = measure(graph)
            next_stage()
            ways = [Way(PLAIN), *_planned(graph, costs, left_out)]
            side_by_side = SideBySide(model, batch, step, graph)
            for way in _selective(model, left_out):
                try:
                    side_by_side.peak_bytes(way)
                    ways.append(way)
                except Exception as error:  # whatever the model does when its layers run again
                    left_out[way.name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        with counting("timing, rounds") as progress:
            rows = side_by_side.rows(ways, progress=progress)
    return Bench(tuple(rows), left_out)


def _planned(graph: StepGraph, costs: Costs, left_out: dict[str, str]) -> Iterator[Way]:
    from lowtide.side_by_side import Way
    from lowtide.solvers.dispatch import solve
    from lowtide.units import format_bytes

    for name, options in _CLASSICS.items():
        try:
            yield Way(name, solve(graph, costs, **options))
        except ValueError as error:
            left_out[name] = str(error).partition("\n")[0]
    for budget in BUDGETS:
        name = f"exact, {budget.replace('%', ' %')}"
        try:
            yield Way(name, solve(graph, costs, budget))
        except BudgetInfeasibleError as error:
            left_out[name] = f"the least peak is {format_bytes(error.least_bytes)}"


def _selective(model: Any, left_out: dict[str, str]) -> Iterator[Way]:
    """PyTorch's own selective checkpointing of the repeated blocks, carried out by PyTorch."""
    from lowtide.settings.blocks import blocks
    from lowtide.settings.carried_out import carried_out
    from lowtide.settings.description import Checkpoint, Description
    from lowtide.side_by_side import Way

    chosen = tuple(Checkpoint((path,), frozenset(_SAC_OPS)) for path in blocks(model))
    if not chosen:
        left_out[_SAC] = "the model has no repeated blocks"
        return
    yield Way(_SAC, around=partial(carried_out, Description(_SAC, chosen), model))


def plot(found: Bench, path: Path) -> None:
    """Write measured activation memory against measured extra time to ``path``; the suffix says how.

    Raises:
        BadUsageError: matplotlib is not installed, or it cannot write that kind of file there.
    """
    from lowtide.errors import LowtideError
    from lowtide.reports.plots import BUDGET, PLAIN, PLANNED, axes_at

    def place(rows: list[Row]) -> tuple[list[float], list[float]]:
        return [100 * row.fraction for row in rows], [100 * (row.time_ratio - 1) for row in rows]

    exact = sorted((r for r in found.rows if r.name.startswith("exact")), key=lambda r: r.fraction)
    others = [r for r in found.rows if not r.name.startswith("exact")]
    try:
        with axes_at(path, (7.5, 4.6), legend_columns=2) as axes:
            style = dict(color=PLANNED, marker="o", markersize=5, linewidth=1.6, label="lowtide, exact")
            axes.plot(*place([*exact, others[0]]), **style)
            axes.plot(*place(others), color=BUDGET, marker="s", markersize=6, linestyle="", label="other methods")
            for row in others:
                (x,), (y,) = place([row])
                axes.annotate(row.name, (x, y), xytext=(7, 4), textcoords="offset points", fontsize=8, color=PLAIN)
            axes.set(xlabel="measured activation memory, % of the plain step's", ylabel="measured extra time, %")
            axes.set_xlim(0, 115)
            axes.grid(linewidth=0.4, alpha=0.4)
    except LowtideError as error:
        raise BadUsageError(str(error)) from error
