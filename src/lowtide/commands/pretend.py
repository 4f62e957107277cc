"""``lowtide pretend``: run a training script on a GPU that is not there."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lowtide.commands.files import check_folders, write
from lowtide.commands.verbs import add_verb
from lowtide.scripts import BadUsageError

_EPILOG = """\
The command is run as it is; it stops after --steps optimizer steps. Exit code: 0 it fits, 1 it does not (or the
script failed), 2 bad usage.

examples:
  lowtide pretend --device h100 -- python train.py --batch-size 8
  lowtide pretend --device a100-80gb --ranks 64 -- torchrun --nproc-per-node 8 train.py
  lowtide pretend --device l4 --budget auto -- python train.py
  lowtide pretend --prepare --torch 2.6.0      an environment for another PyTorch, once
"""


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs, "pretend", run, "run a training script, unmodified, on a GPU that is not there: does it fit?",
        epilog=_EPILOG,
    )  # fmt: skip
    parser.add_argument("--device", default="h100", metavar="NAME", help="a GPU of the table (default h100)")
    parser.add_argument("--memory", metavar="BYTES", help='of each device, "40GiB" (default: what it has)')
    parser.add_argument("--devices", type=int, metavar="N", help="GPUs of this machine (default: one, or the ranks)")
    parser.add_argument("--ranks", type=int, metavar="N", help="of the job (default: as the command's launcher says)")
    parser.add_argument("--rank", default="0", metavar="K", help="the one that runs (default 0); several, 0,4,8 or "
                        "0-7, run one after another, and the largest is reported")  # fmt: skip
    parser.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="default 8")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="optimizer steps; 0: to the end (default 3; 6 with --budget)"
    )
    parser.add_argument("--budget", metavar="BYTES", help='attach lowtide to the script, with "20GiB" or "auto"')
    parser.add_argument("--host-budget", metavar="BYTES", help="host memory that lowtide may move tensors to; 0: none")
    parser.add_argument("--values", choices=("small", "all", "none"), default="small",
                        help="which tensors have right values (small: up to 1 MiB, integers and flags)")  # fmt: skip
    parser.add_argument("--routing", choices=("balanced", "worst"), default="balanced",
                        help="how tokens go to experts that no value tells apart (default balanced)")  # fmt: skip
    parser.add_argument("--no-time", action="store_true", help="do not say what a step takes, which runs three more")
    parser.add_argument("--tokens", type=int, metavar="N", help="of a step of this rank (default: as its ids say)")
    parser.add_argument("--measured", metavar="RATE",
                        help='what it really does there: "10643 tokens/s" (a GPU), "187 ms"; or "speed 0.83" of an '
                        "earlier report")  # fmt: skip
    parser.add_argument("--network", type=float, metavar="GBIT", help="of each GPU to other machines, in Gbit/s")
    parser.add_argument("--clock", action="store_true", help="run it again, with clocks that say what steps take there")
    parser.add_argument("--torch", metavar="VERSION", help="PyTorch's (default: the installed one)")
    parser.add_argument(
        "--no-weights", action="store_true", help="folders with a config.json alone have weights of zeros"
    )
    parser.add_argument("--no-history", action="store_true", help="do not record who allocated what")
    parser.add_argument("--snapshot", type=Path, metavar="FILE", help="a file for PyTorch's memory viewer")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write the report as a page")
    parser.add_argument("--patience", type=float, default=15.0, metavar="MINUTES",
                        help="end a script that takes no step for so long (default 15)")  # fmt: skip
    parser.add_argument("--advise", action="store_true", help="run again with each change that may make it fit")
    parser.add_argument("--prepare", action="store_true", help="make the environment for --torch, and run nothing")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="as it is typed")


def run(args: argparse.Namespace) -> tuple[int, str, dict[str, Any]]:
    """Exit code, text and JSON of the verb."""
    from lowtide.pretending import advice, environments
    from lowtide.pretending.calls import run_pretended
    from lowtide.pretending.outcome_page import page
    from lowtide.pretending.rank_runs import ranks_of
    from lowtide.pretending.settings import PretendSettings, amount

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.prepare:
        if command:
            raise BadUsageError("--prepare runs no command. Leave one of them out.")
        made = environments.prepare(args.torch, lambda line: print(line, file=sys.stderr))
        body = {"status": "ok", "python": str(made.python), "torch": made.torch}
        return 0, f"PyTorch {made.torch} is ready: {made.python}", body
    each = ranks_of(args.rank)
    settings = PretendSettings(
        device=args.device, memory_bytes=None if args.memory is None else amount(args.memory, "--memory"),
        devices=args.devices, ranks=args.ranks, rank=each[0], ranks_per_node=args.ranks_per_node, steps=args.steps,
        budget=args.budget, host_budget=args.host_budget,
        values=args.values, routing=args.routing, torch=args.torch, snapshot=args.snapshot,
        history=not args.no_history, no_weights=args.no_weights, time=not args.no_time,
        tokens=args.tokens, measured=args.measured, network_gbit=args.network, clock=args.clock,
        patience_s=args.patience * 60,
    )  # fmt: skip
    check_folders(args.report, args.snapshot)
    output = sys.stderr if args.json else None
    report = run_pretended(command, settings, output, each)
    if args.advise:
        say = partial(print, "lowtide:", file=sys.stderr)
        changes = advice.advise(report, replace(settings, rank=report.rank), environments.find(args.torch), output, say)
        report = replace(report, changes=changes)
    if args.report:
        write(args.report, lambda path: Path(path).write_text(page(report), encoding="utf-8"))
    text = f"\n{report}" if report.steps or report.out_of_memory else str(report)
    return (0 if report.fits else 1), text, {"status": "ok" if report.fits else "finding", **report.to_json()}
