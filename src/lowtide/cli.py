"""The ``lowtide`` command and its verbs.

stdout carries the result alone, with ``--json`` exactly one JSON object; progress and messages go to stderr.
Exit codes: 0 success, 1 a finding or an infeasible budget, 2 bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lowtide import __version__
from lowtide.commands import advise, bench, calibrate, compare, doctor, kv, plan
from lowtide.errors import BudgetInfeasibleError, LowtideError, PlanMismatchError
from lowtide.scripts import BadUsageError, load_step

if TYPE_CHECKING:
    from lowtide.graph.costs import Costs
    from lowtide.graph.step_graph import StepGraph
    from lowtide.plan import Plan
    from lowtide.runtime.fitted_model import Fit
    from lowtide.verifier import Verification

OK, FINDING, BAD_USAGE = 0, 1, 2
_FIT_EPILOG = """\
A budget is the peak of device memory in forward and backward, weights, gradients and optimizer state included;
with % it is a share of the activation memory of the plain step.

example:
  lowtide fit train.py:setup --budget 6GiB --verify --save plan.json --html report.html
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    code = OK
    try:
        code = _main(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read stdout has had enough: "lowtide report ... | head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
    return code


class _Parser(argparse.ArgumentParser):
    """Raises what argparse would print: with ``--json`` it is JSON too."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise BadUsageError(f"{message}.")


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # --help and --version
        return stop.code if isinstance(stop.code, int) else BAD_USAGE
    except BadUsageError as error:
        code, _, body = _failed(BAD_USAGE, "bad_usage", error)
        if "--json" in (sys.argv[1:] if argv is None else argv):
            print(json.dumps(body))
        return code
    if args.verb is None:
        parser.print_help(sys.stderr)
        return BAD_USAGE
    shown = sys.stdout
    # With --json nothing else may reach stdout, whatever a user's script prints.
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        code, text, body = _run(args)
    if args.json:
        print(json.dumps(_plain_numbers(body), allow_nan=False), file=shown)
    elif text:
        print(text)
    return code


def _run(args: argparse.Namespace) -> tuple[int, str, dict]:
    """Exit code, what to print, and the same as JSON."""
    try:
        return args.verb(args)
    except BadUsageError as error:
        return _failed(BAD_USAGE, "bad_usage", error)
    except BudgetInfeasibleError as error:
        amounts = ("budget_bytes", "least_bytes", "proven_bytes")
        return _failed(FINDING, "infeasible", error, **{name: getattr(error, name) for name in amounts})
    except LowtideError as error:
        # What lowtide refuses by name is a finding about the model; files that are wrong or do not match are bad usage.
        bad = isinstance(error, (ValueError, TypeError, PlanMismatchError))
        return _failed(BAD_USAGE if bad else FINDING, "bad_usage" if bad else "refused", error)


def _failed(code: int, status: str, error: Exception, **facts: Any) -> tuple[int, str, dict]:
    print(f"lowtide: {error}", file=sys.stderr)
    return code, "", {"status": status, "error": str(error), "message": str(error), **facts}


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lowtide",
        description="Run a PyTorch training step within a memory budget, at the least extra time.",
        epilog="example:\n  lowtide fit train.py:setup --budget 6GiB --verify\n"
        "where setup() in train.py returns (model, batch)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lowtide {__version__}")
    parser.set_defaults(verb=None)
    verbs = parser.add_subparsers(metavar="VERB")

    demo = verbs.add_parser("demo", help="the main job on real models and text, on this machine (minutes)")
    demo.add_argument("--case", choices=("minilm", "decoder"), help="only this one")
    demo.add_argument("--quick", action="store_true", help="toy sizes, for a first look or a test")
    demo.set_defaults(verb=_demo)

    fit = verbs.add_parser(
        "fit",
        help="plan the training step of your script, and prove the plan",
        description="Plan the training step of your script, and prove the plan.",
        epilog=_FIT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    budget = '"6GiB", bytes, "40%%" of the plain activations, or "auto" (default)'
    methods = "exact, revolve, rotor, knapsack, every_n, sqrt_n, selective, full or none"
    scratch = "tensors of a model on CPU may move to a file here"
    fit.add_argument("target", metavar="SCRIPT.py:FUNCTION", help="FUNCTION() returns (model, batch[, step])")
    fit.add_argument("--budget", default="auto", help=budget)
    fit.add_argument("--method", default="exact", help=methods)
    fit.add_argument("--scratch-dir", metavar="DIR", type=Path, help=scratch)
    fit.add_argument("--disk-budget", metavar="BYTES", help='most of it, "20GiB"; default nine tenths of what is free')
    fit.add_argument("--verify", action="store_true", help="run plain and planned step, compare every bit, time both")
    fit.add_argument("--save", metavar="PLAN.json", type=Path, help="write the plan")
    fit.add_argument("--save-graph", metavar="GRAPH.json", type=Path, help="write the traced step")
    fit.add_argument("--save-costs", metavar="COSTS.json", type=Path, help="write the measured op times")
    fit.set_defaults(verb=_fit)

    report = verbs.add_parser("report", help="read a saved plan: text, web page or plot")
    report.add_argument("plan", metavar="PLAN.json", type=Path)
    report.add_argument("--graph", metavar="GRAPH.json", type=Path, help="the traced step: memory over time")
    report.add_argument("--costs", metavar="COSTS.json", type=Path, help="its op times")
    frontier = "draw time against memory, every budget and published method"
    report.add_argument("--frontier", metavar="F.png", type=Path, help=frontier)
    report.set_defaults(verb=_report)

    compare.add_parser(verbs)
    bench.add_parser(verbs)
    doctor.add_parser(verbs)
    calibrate.add_parser(verbs)
    kv.add_parser(verbs)
    plan.add_parser(verbs)
    advise.add_parser(verbs)
    for verb in (fit, report):
        verb.add_argument("--html", metavar="F.html", type=Path, help="write a page that needs no other file")
        verb.add_argument("--plot", metavar="F.png", type=Path, help="write memory over time as .png, .svg or .pdf")
    for verb in (demo, fit, report):
        verb.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else there")
    return parser


def _demo(args: argparse.Namespace) -> tuple[int, str, dict]:
    from lowtide.demo import runner
    from lowtide.demo.cases import CASES

    results = []
    for result in runner.run_demo(quick=args.quick, cases=(args.case,) if args.case else CASES):
        results.append(result)
        if not args.json:
            print(runner.case_text(result), end="\n\n", flush=True)
    body = runner.demo_json(results)
    code = OK if body["bitwise_equal"] else FINDING
    return code, f"{body['seconds']:.0f} s in all.", {"status": "ok" if code == OK else "finding", **body}


def _fit(args: argparse.Namespace) -> tuple[int, str, dict]:
    import lowtide
    from lowtide.graph import json_format
    from lowtide.reports.summary import summary

    budget = _budget(args.budget)
    _check_folders(args.save, args.save_graph, args.save_costs, args.html, args.plot)
    disk_budget = None if args.disk_budget is None else _budget(args.disk_budget)
    model, batch, step = load_step(args.target)
    try:
        offload = lowtide.Offload(args.scratch_dir, disk_budget)
        fit: Fit = lowtide.fit(model, batch, step=step, budget=budget, method=args.method, offload=offload)
    except LowtideError:
        raise
    except (ValueError, TypeError) as error:
        raise BadUsageError(str(error)) from error
    try:
        verification = fit.verify(batch) if args.verify else None
        text = fit.report(measure=False)
        counts = fit.training_counts()
    finally:
        fit.remove()
    for path, save in (
        (args.save, fit.plan.save),
        (args.save_graph, partial(json_format.save, fit.graph)),
        (args.save_costs, partial(json_format.save_costs, fit.costs)),
    ):
        if path:
            _write(path, save)
    _pictures(args, fit.plan, fit.graph, verification, fit.costs)
    found = _findings(verification, fit.plan) if verification else []
    body = {
        "status": "finding" if found else "ok",
        "findings": found,
        **summary(fit.plan, verification, counts, fit.warnings),
        "proof": None if verification is None else {**asdict(verification), "bitwise_equal": verification.equal},
    }
    for line in found:
        print(f"lowtide: {line}", file=sys.stderr)
    return FINDING if found else OK, text, body


def _budget(text: str) -> int | str:
    """Refused before a script runs for minutes."""
    from lowtide.argument_checks import check_budget

    budget = int(text) if text.strip().lstrip("-").isdecimal() else text
    try:
        check_budget(budget)
    except (ValueError, TypeError) as error:
        raise BadUsageError(str(error)) from error
    return budget


def _check_folders(*paths: Path | None) -> None:
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise BadUsageError(f"cannot write {path}: there is no folder {path.parent}.\nMake it first.")


def _findings(verification: Verification, plan: Plan) -> list[str]:
    """What ``--verify`` found wrong, each with values."""
    found = []
    if not verification.equal:
        found.append(f"the planned step differs from the plain one in {', '.join(verification.differing)}.")
    if plan.budget_bytes is not None and not verification.note and verification.measured_peak_bytes > plan.budget_bytes:
        over = verification.measured_peak_bytes - plan.budget_bytes
        found.append(f"the measured peak is {verification.measured_peak_bytes} bytes, {over} over the budget.")
    return found


def _report(args: argparse.Namespace) -> tuple[int, str, dict]:
    from lowtide.graph import json_format
    from lowtide.plan import Plan
    from lowtide.reports.summary import summary
    from lowtide.reports.terminal import fit_report

    _check_folders(args.html, args.plot, args.frontier)
    plan = _read(args.plan, Plan.load, "a plan", "--save PLAN.json")
    graph = args.graph and _read(args.graph, json_format.load, "a graph", "--save-graph GRAPH.json")
    if args.plot and graph is None:
        raise BadUsageError(
            "--plot needs the traced step, which a plan does not hold.\n"
            "Add --graph GRAPH.json, written by: lowtide fit ... --save-graph GRAPH.json"
        )
    costs = args.costs and _read(args.costs, json_format.load_costs, "op times", "--save-costs COSTS.json")
    if args.frontier and (graph is None or costs is None):
        raise BadUsageError(
            "--frontier plans the traced step for every budget, and a plan holds neither step nor op times.\n"
            "Add --graph GRAPH.json --costs COSTS.json, written by: lowtide fit ... --save-graph ... --save-costs ..."
        )
    _pictures(args, plan, graph, None, costs)
    body = {"status": "ok", **summary(plan)}
    if args.frontier:
        body |= _frontier(args.frontier, graph, costs)
    return OK, fit_report(plan, graph), body


def _frontier(path: Path, graph: StepGraph, costs: Costs) -> dict:
    from lowtide.reports.progress import counting
    from lowtide.reports.trade_off import plot_trade_off, trade_off

    if len(costs.op_ms) != len(graph.ops):
        raise BadUsageError(
            f"--costs has times for {len(costs.op_ms)} ops, --graph has {len(graph.ops)} ops.\n"
            "Write both in one run: lowtide fit ... --save-graph GRAPH.json --save-costs COSTS.json"
        )
    with counting("planning") as progress:
        found = trade_off(graph, costs, progress=progress)
    plot_trade_off(found, path)
    return found.as_json()


def _pictures(
    args: argparse.Namespace, plan: Plan, graph: StepGraph | None, proof: Verification | None, costs: Costs | None
) -> None:
    from lowtide.reports.html import html_report
    from lowtide.reports.plots import plot_memory

    if args.html:
        page = html_report(plan, graph, proof, costs=costs)
        _write(args.html, lambda path: path.write_text(page, encoding="utf-8"))
    if args.plot and graph is not None:
        try:
            plot_memory(graph, plan, args.plot, costs=costs)
        except LowtideError as error:
            raise BadUsageError(str(error)) from error


def _read(path: Path, load: Callable[[Path], Any], what: str, option: str) -> Any:
    how = f"Write one with: lowtide fit ... {option}"
    try:
        return load(path)
    except OSError as error:
        raise BadUsageError(f"cannot read {what} from {path}: {error.strerror}.\n{how}") from error
    except UnicodeDecodeError as error:
        raise BadUsageError(f"{path} is not {what}: it is not text.\n{how}") from error


def _write(path: Path, save: Callable[[Path], Any]) -> None:
    try:
        save(path)
    except OSError as error:
        raise BadUsageError(f"cannot write {path}: {error.strerror}.\nName a file in a folder that exists.") from error


def _plain_numbers(value: Any) -> Any:
    """NaN and infinity are no JSON: null instead."""
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_numbers(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
