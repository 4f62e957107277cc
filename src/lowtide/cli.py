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
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lowtide import __version__
from lowtide.commands import advise, bench, calibrate, compare, doctor, kv, plan, pretend, report, run
from lowtide.commands.files import check_folders, write
from lowtide.commands.verbs import add_target, add_verb, budget_of
from lowtide.errors import BudgetInfeasibleError, LowtideError, PlanMismatchError
from lowtide.scripts import BadUsageError, load_step

if TYPE_CHECKING:
    from lowtide.plan import Plan
    from lowtide.training.fitted_model import Fit
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
    if not args.speaks():
        return code
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
        bad = isinstance(error, (ValueError, TypeError, ImportError, PlanMismatchError))
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
    parser.set_defaults(verb=None, speaks=lambda: True)
    verbs = parser.add_subparsers(metavar="VERB")

    demo = add_verb(verbs, "demo", _demo, "training steps with and without a plan, measured on this machine (a minute)")
    demo.add_argument("--case", choices=("decoder", "minilm"), help="only this one")
    demo.add_argument("--minutes", type=float, default=1.0, help="more of them measure and train longer (default 1)")
    demo.add_argument("--quick", action="store_true", help="toy sizes, for a test")

    fit = add_verb(verbs, "fit", _fit, "plan the training step of your script, and prove the plan", epilog=_FIT_EPILOG)
    budget = '"6GiB", bytes, "40%%" of the plain activations, or "auto" (default)'
    methods = "exact, revolve, rotor, knapsack, every_n, sqrt_n, selective, full or none"
    scratch = "tensors of a model on CPU may move to a file here"
    add_target(fit)
    fit.add_argument("--budget", default="auto", help=budget)
    fit.add_argument("--method", default="exact", help=methods)
    fit.add_argument("--scratch-dir", metavar="DIR", type=Path, help=scratch)
    fit.add_argument("--disk-budget", metavar="BYTES", help='most of it, "20GiB"; default nine tenths of what is free')
    fit.add_argument("--verify", action="store_true", help="run plain and planned step, compare every bit, time both")
    fit.add_argument("--save", metavar="PLAN.json", type=Path, help="write the plan")
    fit.add_argument("--save-graph", metavar="GRAPH.json", type=Path, help="write the traced step")
    fit.add_argument("--save-costs", metavar="COSTS.json", type=Path, help="write the measured op times")
    report.add_picture_arguments(fit)

    for verb in (compare, bench, doctor, calibrate, kv, plan, advise, pretend, run, report):
        verb.add_parser(verbs)
    return parser


def _demo(args: argparse.Namespace) -> tuple[int, str, dict]:
    from lowtide.demo import runner
    from lowtide.demo.cases import CASES

    results = []
    cases = (args.case,) if args.case else tuple(CASES)
    for result in runner.run_demo(quick=args.quick, cases=cases, minutes=args.minutes):
        if not args.json:
            show = runner.table_text if result.training is None else runner.training_text
            print(show(result), end="\n\n", flush=True)
        if result.training is not None:
            results.append(result)
    body = runner.demo_json(results)
    code = OK if body["bitwise_equal"] else FINDING
    text = f"{body['seconds']:.0f} s in all. Your own step: lowtide fit train.py:setup --budget 50% --verify"
    return code, text, {"status": "ok" if code == OK else "finding", **body}


def _fit(args: argparse.Namespace) -> tuple[int, str, dict]:
    import lowtide
    from lowtide.graph import json_format
    from lowtide.reports.summary import summary

    budget = _budget(args.budget)
    check_folders(args.save, args.save_graph, args.save_costs, args.html, args.plot)
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
            write(path, save)
    report.draw(args, fit.plan, fit.graph, verification, fit.costs)
    found = _findings(verification, fit.plan) if verification else []
    body = {
        "status": "finding" if found else "ok",
        "findings": found,
        **summary(fit.plan, verification, counts, fit.warnings, graph=fit.graph),
        "proof": None if verification is None else {**asdict(verification), "bitwise_equal": verification.equal},
    }
    for line in found:
        print(f"lowtide: {line}", file=sys.stderr)
    return FINDING if found else OK, text, body


def _budget(text: str) -> int | str:
    """Refused before a script runs for minutes."""
    from lowtide.argument_checks import check_budget

    return budget_of(text, check_budget)


def _findings(verification: Verification, plan: Plan) -> list[str]:
    """What ``--verify`` found wrong, each with values."""
    found = []
    if not verification.equal:
        found.append(f"the planned step differs from the plain one in {', '.join(verification.differing)}.")
    peak, budget = verification.measured_peak_bytes, plan.budget_bytes
    if budget is not None and peak is not None and not verification.note and peak > budget:
        found.append(f"the measured peak is {peak} bytes, {peak - budget} over the budget.")
    return found


def _plain_numbers(value: Any) -> Any:
    """NaN and infinity are no JSON: null instead."""
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_numbers(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
