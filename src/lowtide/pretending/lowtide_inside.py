"""Runs in the script's own process with ``--budget``: what came of lowtide, which ``lowtide.attaching`` attaches there.

Loaded by path (``cuda_standin.script``).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

_WATCHED = 2  # steps that lowtide sees before it plans
_PLANNING_S = 300.0


class Inside:
    """The attachment of this process, as the report has it."""

    def __init__(self) -> None:
        import lowtide
        from lowtide.attaching import attachment, entering, variables

        entering.enter()
        wanted = variables.read()
        assert wanted is not None  # ``command_run`` has set it
        self._attachment = attachment.start(wanted)  # torch has just been imported
        self._attachment.raises = False  # the report says why there is none
        if host_budget := os.environ.get("LOWTIDE_PRETEND_HOST_BUDGET", ""):
            offload = lowtide.Offload(host_budget=None if host_budget == "0" else host_budget)
            self._attachment.options["offload"] = offload

    def wait(self) -> None:
        """No step takes a GPU's time here: planning beside training would come many steps later than there."""
        fit = self._attachment.find_fit()
        if fit is None or fit.status().in_force or fit.status().steps < _WATCHED:
            return
        with contextlib.suppress(Exception):  # the status says why there is no plan
            fit.wait(_PLANNING_S)

    def facts(self) -> dict[str, Any]:
        self.wait()
        fit = self._attachment.find_fit()
        if fit is None:
            return {"in_force": False, "budget_bytes": None, "planned_steps": 0, "predicted_overhead": None,
                    "predicted_peak_bytes": None, "reasons": [self._attachment.why_not]}  # fmt: skip
        status = fit.status()
        plan = getattr(fit, "plan", None) if status.in_force else None
        return {
            "in_force": status.in_force,
            "budget_bytes": status.budget_bytes,
            "planned_steps": status.planned_steps,
            "predicted_overhead": getattr(plan, "predicted_overhead", None),
            "predicted_peak_bytes": getattr(plan, "measurable_peak_bytes", None),  # as steps are counted
            "reasons": list(status.reasons),
        }


def start(torch: ModuleType) -> None:
    from cuda_standin.script import record

    inside = Inside()
    record.helpers.append(str(Path(__file__).parents[1]) + os.sep)
    record.before_write.append(lambda: record.facts.update(lowtide=inside.facts()))
