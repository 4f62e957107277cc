"""A committed answer of ``lowtide plan`` compared with the one of today: what got worse, by module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lowtide.reports.worse import CommittedPlanError, Worse

_SETUP = "setup"


def read(path: Path) -> dict[str, Any]:
    """Raises: CommittedPlanError: not there, or not written by ``lowtide plan --save``."""
    how = "Write one with: lowtide plan ... --save PLAN.json"
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommittedPlanError(f"--check: cannot read {path}: {error.strerror}. {how}") from error
    except ValueError as error:
        raise CommittedPlanError(f"--check: {path} is not JSON ({error}). {how}") from error
    if not isinstance(body, dict) or not {"peak_bytes", "step_ms", "by_module", _SETUP} <= body.keys():
        raise CommittedPlanError(f"--check: {path} is no answer of lowtide plan. {how}")
    return body


def compare(before: dict[str, Any], now: dict[str, Any], tolerance: float) -> list[Worse]:
    """What is worse than ``before`` by more than ``tolerance``, as a part of what it was.

    Raises:
        CommittedPlanError: the two are of other setups.
    """
    differing = [f"{name} {before[_SETUP].get(name)!r}, now {value!r}" for name, value in now[_SETUP].items()
                 if before[_SETUP].get(name) != value]  # fmt: skip
    if differing:
        raise CommittedPlanError(
            f"--check: the committed plan is of another setup: {'; '.join(differing)}. Pass the same options, or save "
            "a new one."
        )
    found = []
    for what, columns in (("peak_bytes", ("parameters", "activations")), ("step_ms", ("step_ms",))):
        old, new = _expected(before[what]), _expected(now[what])
        lost = old is not None and new is None  # a time that is no more: no plan fits
        if lost or (old is not None and new is not None and new > old * (1 + tolerance)):
            modules = _grown(before["by_module"], now["by_module"], columns)
            found.append(Worse(what, old or 0.0, float("nan") if new is None else new, modules))
    return found


def _expected(amount: Any) -> float | None:
    return None if amount is None else amount["expected"]


def _grown(
    before: dict[str, dict[str, float]], now: dict[str, dict[str, float]], columns: tuple[str, ...]
) -> list[tuple[str, str, float, float]]:
    rows = []
    for module in sorted({*before, *now}):
        for column in columns:
            old, new = before.get(module, {}).get(column, 0), now.get(module, {}).get(column, 0)
            if new > old:
                rows.append((module, column, old, new))
    return sorted(rows, key=lambda row: row[2] - row[3])
