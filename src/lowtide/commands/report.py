"""``lowtide report``: a saved plan as text, web page or pictures, alone or beside another one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.commands.files import check_folders, read, write
from lowtide.commands.verbs import add_verb
from lowtide.errors import LowtideError
from lowtide.scripts import BadUsageError

if TYPE_CHECKING:
    from lowtide.graph.costs import Costs
    from lowtide.graph.step_graph import StepGraph
    from lowtide.plan import Plan
    from lowtide.reports.trade_off import TradeOff
    from lowtide.verifier import Verification

_EPILOG = """\
examples:
  lowtide report plan.json --graph graph.json --costs costs.json --html report.html --frontier
  lowtide report plan.json --by layer tensor
  lowtide report --compare before.json after.json --html difference.html
  lowtide report plan.json --check committed.json --tolerance 0.02
"""


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    description = "Read a saved plan: what fills memory, what was decided, what binds and what would help."
    parser = add_verb(verbs, "report", run, "read a saved plan: text, web page or plot", description, _EPILOG)
    parser.add_argument("plan", metavar="PLAN.json", type=Path, nargs="?")
    parser.add_argument("--compare", metavar=("A.json", "B.json"), type=Path, nargs=2, help="two plans side by side")
    parser.add_argument("--graph", metavar="GRAPH.json", type=Path, help="the traced step: memory over time")
    parser.add_argument("--costs", metavar="COSTS.json", type=Path, help="its op times")
    parser.add_argument(
        "--check", metavar="COMMITTED.json", type=Path, help="exit 1 if peak or time of PLAN.json got worse than there"
    )
    parser.add_argument("--tolerance", type=float, default=0.02, help="of --check: by more than this part (0.02)")
    groups = ("module", "layer", "operator", "tensor")
    by = "what the text groups decisions by (default: module operator)"
    parser.add_argument("--by", nargs="+", choices=groups, default=("module", "operator"), help=by)
    frontier = (
        "time against memory, every budget and published method: on the page, and drawn to a file if one is named"
    )
    parser.add_argument("--frontier", metavar="F.png", nargs="?", type=Path, const=Path(), help=frontier)
    add_picture_arguments(parser)


def add_picture_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that ``draw`` reads."""
    parser.add_argument("--html", metavar="F.html", type=Path, help="write a page that needs no other file")
    parser.add_argument("--plot", metavar="F.png", type=Path, help="write memory over time as .png, .svg or .pdf")


def run(args: argparse.Namespace) -> tuple[int, str, dict[str, Any]]:
    """Exit code, text and JSON of the verb."""
    from lowtide.graph import json_format
    from lowtide.reports.summary import summary
    from lowtide.reports.terminal import fit_report
    from lowtide.reports.worse import told, worse_than

    check_folders(args.html, args.plot, args.frontier)
    if args.compare:
        return _compare(args)
    if args.plan is None:
        raise BadUsageError("report needs a plan: lowtide report PLAN.json, or lowtide report --compare A.json B.json")
    plan = _plan(args.plan)
    if not 0 <= args.tolerance < 10:
        raise BadUsageError(f"--tolerance {args.tolerance} is no part. Pass 0.02 for 2 %.")
    worse = None if args.check is None else worse_than(_plan(args.check), plan, args.tolerance)
    graph = args.graph and read(args.graph, json_format.load, "a graph", "--save-graph GRAPH.json")
    if args.plot and graph is None:
        raise BadUsageError(
            "--plot needs the traced step, which a plan does not hold.\n"
            "Add --graph GRAPH.json, written by: lowtide fit ... --save-graph GRAPH.json"
        )
    costs = args.costs and read(args.costs, json_format.load_costs, "op times", "--save-costs COSTS.json")
    if args.frontier and (graph is None or costs is None):
        raise BadUsageError(
            "--frontier plans the traced step for every budget, and a plan holds neither step nor op times.\n"
            "Add --graph GRAPH.json --costs COSTS.json, written by: lowtide fit ... --save-graph ... --save-costs ..."
        )
    front = _front(args.frontier, graph, costs) if args.frontier else None
    draw(args, plan, graph, None, costs, front)
    body = {"status": "ok", **summary(plan, graph=graph), **({} if front is None else front.as_json())}
    text = fit_report(plan, graph, by=args.by)
    if worse is None:
        return 0, text, body
    body["status"] = "finding" if worse else "ok"
    body["check"] = {"tolerance": args.tolerance, "worse": [one.as_json() for one in worse]}
    return int(bool(worse)), f"{text}\n{told(worse, args.check, args.tolerance)}", body


def _compare(args: argparse.Namespace) -> tuple[int, str, dict[str, Any]]:
    from lowtide.reports.comparison import Comparison

    if args.plan is not None or args.graph or args.plot or args.frontier or args.check:
        raise BadUsageError(
            "--compare takes two plans and --html, nothing else: lowtide report --compare A.json B.json"
        )
    a, b = args.compare
    found = Comparison(str(a), str(b), _plan(a), _plan(b))
    if args.html:
        page = found.html()
        write(args.html, lambda path: path.write_text(page, encoding="utf-8"))
    return 0, found.text(), {"status": "ok", **found.as_json()}


def _plan(path: Path) -> Plan:
    from lowtide.plan import Plan

    return read(path, Plan.load, "a plan", "--save PLAN.json")


def _front(path: Path, graph: StepGraph, costs: Costs) -> TradeOff:
    from lowtide.reports.progress import counting
    from lowtide.reports.trade_off import plot_trade_off, trade_off

    if len(costs.op_ms) != len(graph.ops):
        raise BadUsageError(
            f"--costs has times for {len(costs.op_ms)} ops, --graph has {len(graph.ops)} ops.\n"
            "Write both in one run: lowtide fit ... --save-graph GRAPH.json --save-costs COSTS.json"
        )
    with counting("planning") as progress:
        found = trade_off(graph, costs, progress=progress)
    if path != Path():
        plot_trade_off(found, path)
    return found


def draw(
    args: argparse.Namespace,
    plan: Plan,
    graph: StepGraph | None,
    proof: Verification | None,
    costs: Costs | None,
    front: TradeOff | None = None,
) -> None:
    """Write the page and the plot that ``args`` ask for.

    Raises:
        BadUsageError: one cannot be written.
    """
    from lowtide.reports.html import html_report
    from lowtide.reports.plots import plot_memory

    if args.html:
        page = html_report(plan, graph, proof, costs=costs, front=front)
        write(args.html, lambda path: path.write_text(page, encoding="utf-8"))
    if args.plot and graph is not None:
        try:
            plot_memory(graph, plan, args.plot, costs=costs)
        except LowtideError as error:
            raise BadUsageError(str(error)) from error
