"""All checks, by code: every file of ``checks`` has a ``CHECK`` and a function ``find``."""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import NamedTuple

from lowtide.doctor import checks
from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest


class Registered(NamedTuple):
    """A check, and what it finds in a set-up."""

    check: Check
    find: Callable[[StepUnderTest], Finding | None]


@functools.cache
def all_checks() -> dict[str, Registered]:
    """By code, in order."""
    modules = [importlib.import_module(f"{checks.__name__}.{m.name}") for m in pkgutil.iter_modules(checks.__path__)]
    found = {m.CHECK.code: Registered(m.CHECK, m.find) for m in modules}
    assert len(found) == len(modules), "two checks have one code"
    return dict(sorted(found.items()))


def table() -> str:
    """The checks as a table in Markdown."""
    rows = ["| code | severity | what it finds | what you notice | known from |", "|---|---|---|---|---|"]
    for check, _ in all_checks().values():
        rows.append(f"| {check.code} | {check.severity} | {check.title} | {check.symptom} | {check.source} |")
    return "\n".join(rows)
