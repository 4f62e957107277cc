"""A plan compared with a committed one, for CI: which numbers got worse, and in which modules."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowtide.errors import LowtideError
from lowtide.plan import COMPILED, Plan
from lowtide.reports.comparison import Comparison, ModuleChange
from lowtide.units import format_bytes


class CommittedPlanError(LowtideError, ValueError):
    """A file holds no answer to compare with, or one of another setup."""


@dataclass(frozen=True)
class Worse:
    """One number that got worse; ``modules``: (path, what, before, now) of what grew, largest first."""

    what: str
    before: float
    now: float
    modules: list[tuple[str, str, float, float]]

    def as_json(self) -> dict[str, Any]:
        names = ("module", "what", "before", "now")
        return asdict(self) | {"modules": [dict(zip(names, row, strict=True)) for row in self.modules]}


def worse_than(committed: Plan, now: Plan, tolerance: float) -> list[Worse]:
    """What is worse than in ``committed`` by more than ``tolerance``, as a part of what it was.

    Times are those of the step beside its plain one: milliseconds are another machine's.

    Raises:
        CommittedPlanError: they are for different devices, or one is of compiled layers and the other is not.
    """
    setups = [(plan.device, "compiled layers" if plan.method == COMPILED else "a step") for plan in (committed, now)]
    if setups[0] != setups[1]:
        before, after = (f"{kind} on {device}" for device, kind in setups)
        raise CommittedPlanError(f"--check: the committed plan is of {before}, this one of {after}. Save a new one.")
    changes = Comparison("committed", "now", committed, now).modules()
    found = []
    for name, old, new, column in (
        ("predicted_peak_bytes", committed.predicted_peak_bytes, now.predicted_peak_bytes, "saved_bytes"),
        ("plain_peak_bytes", committed.plain_peak_bytes, now.plain_peak_bytes, "stored_bytes"),
        ("step_time", 1 + committed.predicted_overhead, 1 + now.predicted_overhead, "recompute_ms"),
    ):
        if new > old * (1 + tolerance):
            found.append(Worse(name, old, new, _grown(changes, column)))
    return found


def _grown(changes: list[ModuleChange], column: str) -> list[tuple[str, str, float, float]]:
    pairs = [(change.name, *getattr(change, column)) for change in changes]
    rows = [(module, column, before, now) for module, before, now in pairs if now > before]
    return sorted(rows, key=lambda row: row[2] - row[3])


def told(worse: list[Worse], path: Path, tolerance: float) -> str:
    """The comparison for a terminal."""
    if not worse:
        return f"No worse than {path}, by {tolerance:.1%} at most."
    lines = []
    for one in worse:
        show = _shown(one.what)
        grown = f"{one.now / one.before - 1:+.1%}" if one.before else ""
        lines.append(f"{one.what} is worse than in {path}: {show(one.before)} -> {show(one.now)} ({grown})")
        for module, what, before, now in one.modules[:8]:
            shown = _shown(what)
            lines.append(f"  {module or 'the step itself'}: {what} {shown(before)} -> {shown(now)}")
    return "\n".join(lines)


def _shown(what: str) -> Callable[[Any], str]:
    if what.endswith("_ms"):
        return lambda ms: f"{ms:.1f} ms"
    return (lambda times: f"{times:.3f} of plain") if what == "step_time" else format_bytes
