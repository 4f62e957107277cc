"""What ``planner.py`` and ``planner_times.py`` share: the budgets to plan for, and how lines are written."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cases import CASES

FRACTIONS = ("50%", "36%", "25%")


def solves(graph: Any, costs: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Budget by name, and the call that plans for it."""
    import lowtide

    def exact(budget: int | str) -> Callable[[], Any]:
        return lambda: lowtide.solve(graph, costs, budget)

    yield "none", lambda: lowtide.solve(graph, costs, method="none")
    for fraction in FRACTIONS:
        yield fraction, exact(fraction)
    try:
        full = lowtide.solve(graph, costs, method="full")
    except ValueError:  # no layer repeats
        full = None
    if full is not None:
        yield "full checkpointing", lambda: full
        yield "at full's peak", exact(full.predicted_peak_bytes)
    yield "least", lambda: exact(least_bytes(graph, costs))()


def least_bytes(graph: Any, costs: Any) -> int:
    """The least budget that the planner names when it is asked for an impossible one."""
    import lowtide

    try:
        return lowtide.solve(graph, costs, graph.resident_bytes).predicted_peak_bytes
    except lowtide.BudgetInfeasibleError as error:
        return error.least_bytes


def failed(error: Exception) -> dict:
    where = traceback.extract_tb(error.__traceback__)[-1]
    first = (str(error).splitlines() or [""])[0]
    return {"status": "failed", "error": f"{type(error).__name__}: {first}", "at": f"{where.name}:{where.lineno}"}


def write(out: Path, lines: list[dict]) -> None:
    """Put ``lines`` in place of those that ``out`` has for the same cases; cases in the order of ``cases.py``."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = {line["case"] for line in lines}
    old = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    both = [line for line in old if line["case"] not in fresh and line["case"] in CASES] + lines
    both.sort(key=lambda line: list(CASES).index(line["case"]))
    out.write_text("".join(json.dumps(line) + "\n" for line in both))
