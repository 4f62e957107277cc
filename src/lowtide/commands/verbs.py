"""What the verbs of the command line share: how one is added, and arguments that several take."""

import argparse
from collections.abc import Callable
from typing import Any

from lowtide.scripts import BadUsageError


def add_verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], tuple[int, str, dict[str, Any]]], help: str,
    description: str = "", epilog: str = "",
) -> argparse.ArgumentParser:  # fmt: skip
    """Add a verb; ``run`` returns exit code, text and JSON.

    Args:
        description: Default: ``help`` as a sentence.
    """
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=help,
        description=description or f"{help[0].upper()}{help[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else there")
    parser.set_defaults(verb=run)
    return parser


def add_target(parser: argparse.ArgumentParser) -> None:
    """The script that ``load_step`` loads."""
    parser.add_argument("target", metavar="SCRIPT.py:FUNCTION", help="FUNCTION() returns (model, batch[, step])")


def budget_of(text: str, check: Callable[[int | str], Any]) -> int | str:
    """A budget as a command line has it. Raises: BadUsageError: ``check`` refuses it."""
    budget = int(text) if text.strip().lstrip("-").isdecimal() else text
    try:
        check(budget)
    except (ValueError, TypeError) as error:
        raise BadUsageError(str(error)) from error
    return budget
