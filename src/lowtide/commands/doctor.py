"""``lowtide doctor``: what is silently wrong with a user's own training step, and the mend."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from lowtide.commands.verbs import add_target, add_verb
from lowtide.scripts import BadUsageError, load_step

if TYPE_CHECKING:
    from typing import Any

    from lowtide.doctor.diagnosis import Diagnosis


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs, "doctor", run, "what is silently wrong with your training step, and the mend",
        "Run your training step a few times and say what is silently wrong with it.",
        "example:\n  lowtide doctor train.py:setup --fix\n"
        "Exits with 1 where numbers are wrong, or memory or time is wasted.",
    )  # fmt: skip
    add_target(parser)
    parser.add_argument("--only", metavar="CODES", help="run these checks alone: LT001,LT101")
    parser.add_argument("--skip", metavar="CODES", help="leave these checks out")
    parser.add_argument("--fix", action="store_true", help="print the changed settings; no file is edited")
    parser.set_defaults(speaks=is_first_rank)


def run(args: argparse.Namespace) -> tuple[int, str, dict]:
    """Exit code, what to print, and the same as JSON."""
    from lowtide.doctor.diagnosis import checks_named, diagnose

    only, skip = _codes(args.only), _codes(args.skip)
    try:
        checks_named(only, skip)  # a typing error shows before a script runs for minutes
    except ValueError as error:
        raise BadUsageError(str(error)) from error
    found = diagnose(*load_step(args.target), only=only, skip=skip)
    body = {"status": "finding" if found.fails else "ok", **found.to_dict()}
    return int(found.fails), _text(found, fix=args.fix), body


def is_first_rank() -> bool:
    """Every rank looks, since steps communicate; one of them speaks."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def _codes(text: str | None) -> tuple[str, ...]:
    return tuple(code.strip().upper() for code in (text or "").split(",") if code.strip())


def _text(found: Diagnosis, *, fix: bool) -> str:
    if not fix:
        return str(found)
    lines = [line for f in found if f.fix for line in (f"# {f.code} {f.title}", f.fix)]
    return "\n".join([str(found), "", "changed settings:", *(lines or ["none: see the mends"])])
