"""``lowtide run``: a training command within a memory budget, its code as it is."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from lowtide.commands.files import check_folders, write
from lowtide.commands.verbs import add_verb, budget_of
from lowtide.options import ON_EXCESS
from lowtide.scripts import BadUsageError

_EPILOG = """\
lowtide attaches itself to transformers' Trainer, to Lightning's, or to the first module that is trained, and says to
what. The exit code is the command's; 1 where it ended well and nothing was attached.

examples:
  lowtide run --budget 20GiB -- python train.py
  lowtide run --budget 20GiB -- torchrun --nproc-per-node 8 train.py
  lowtide run --budget 20GiB -- accelerate launch train.py
  lowtide run --enable      LOWTIDE_BUDGET=20GiB python train.py then does the same, in this environment
"""
_PTH = "lowtide-attaching.pth"
# One line, as Python reads such files; nothing is imported without the variable.
_PTH_LINE = (
    'import os, importlib.util as u; os.environ.get("LOWTIDE_BUDGET") and u.find_spec("lowtide") and '
    '__import__("lowtide.attaching.entering", fromlist=["enter"]).enter()\n'
)


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(verbs, "run", run, "run a training command within a memory budget, its code as it is",
                      epilog=_EPILOG)  # fmt: skip
    parser.add_argument("--budget", metavar="BYTES", help='of each process: "20GiB", bytes, "40%%" or "auto"')
    parser.add_argument("--on-excess", choices=ON_EXCESS, default=ON_EXCESS[0],
                        help="what follows a step that took more (default warn)")  # fmt: skip
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write the plan as a page at the end")
    parser.add_argument("--enable", action="store_true", help="have LOWTIDE_BUDGET work in this environment by itself")
    parser.add_argument("--disable", action="store_true", help="undo --enable")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="as it is typed")


def run(args: argparse.Namespace) -> tuple[int, str, dict[str, Any]]:
    """Exit code, text and JSON of the verb."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.enable or args.disable:
        if command or args.budget or (args.enable and args.disable):
            raise BadUsageError("--enable and --disable stand alone: they run no command. Leave the rest out.")
        return _switch(on=args.enable)
    if not command:
        raise BadUsageError(
            "there is no command. Write it after two dashes: lowtide run --budget 20GiB -- python train.py"
        )
    if args.budget is None:
        raise BadUsageError("there is no budget. Write one: lowtide run --budget 20GiB -- ..., or --budget auto.")
    from lowtide.argument_checks import check_budget
    from lowtide.attaching import variables

    budget_of(args.budget, check_budget)
    check_folders(args.report)
    if shutil.which(command[0]) is None:
        raise BadUsageError(f"{command[0]!r} is no program on the path. Write the command as without lowtide run.")
    with tempfile.TemporaryDirectory(prefix="lowtide-run-") as folder:
        outcome = Path(folder) / "outcome.json"
        report = "" if args.report is None else str(args.report.absolute())
        wanted = variables.Wanted(args.budget, args.on_excess, report, str(outcome))
        code = _exit_code(command, wanted, quiet=args.json)
        found = json.loads(outcome.read_text(encoding="utf-8")) if outcome.exists() else {}
    attached = found.get("attached_to")
    if attached is None and code == 0:
        why = found.get("why_not") or "no process of the command trained a module with an optimizer of torch.optim"
        print(f"lowtide: nothing was attached: {why}.", file=sys.stderr)
    exit_code = code or (1 if attached is None else 0)
    status = "ok" if exit_code == 0 else "finding"
    body = {"status": status, "exit_code": code, "attached_to": attached, "why_not": found.get("why_not", ""),
            "lowtide": found.get("status")}  # fmt: skip
    return exit_code, "", body


def _exit_code(command: list[str], wanted: Any, *, quiet: bool) -> int:
    """Run the command to its end; who ends this process ends it too."""
    from lowtide.attaching import variables

    process = subprocess.Popen(
        command, env=variables.entering(os.environ, wanted), stdout=sys.stderr if quiet else None
    )  # fmt: skip
    before = {sign: signal.signal(sign, lambda number, _: process.send_signal(number))
              for sign in (signal.SIGTERM, signal.SIGINT)}  # fmt: skip
    try:
        code = process.wait()
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
    return code if code >= 0 else 128 - code


def _switch(*, on: bool) -> tuple[int, str, dict[str, Any]]:
    path = Path(sysconfig.get_paths()["purelib"]) / _PTH
    if on:
        write(path, lambda file: file.write_text(_PTH_LINE, encoding="utf-8"))
        text = f"LOWTIDE_BUDGET=20GiB python train.py keeps a budget now, by {path}. lowtide run --disable undoes it."
    else:
        path.unlink(missing_ok=True)
        text = "LOWTIDE_BUDGET does nothing by itself now; lowtide run goes on to work."
    return 0, text, {"status": "ok", "path": str(path), "enabled": on}
