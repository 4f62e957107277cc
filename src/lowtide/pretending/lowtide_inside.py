"""Runs in the script's own process with ``--budget``: lowtide is attached to the first model that is trained.

Loaded by path (``cuda_standin.script``). The model is the outermost module that is called with gradients while an
optimizer holds its parameters; it is fitted before that call. The loop is not known, so the first step is watched.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

_WATCHED = 2  # steps that lowtide sees before it plans
_PLANNING_S = 300.0


class Attachment:
    """The fit of the script's model, or why there is none."""

    def __init__(self, torch: ModuleType, budget: str) -> None:
        self._torch = torch
        self._budget: int | str = int(budget) if budget.isdecimal() else budget
        self._optimizers: list[Any] = []
        self._fit: Any = None
        self._is_done = False
        self._why = "no module was called in training whose parameters an optimizer holds"
        make = torch.optim.Optimizer.__init__

        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            self._optimizers.append(optimizer)

        torch.optim.Optimizer.__init__ = made
        self._call = torch.nn.Module.__call__

        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            self._before_call(module)
            return module(*args, **kwargs) if self._is_done else self._call(module, *args, **kwargs)

        torch.nn.Module.__call__ = called

    def _before_call(self, module: Any) -> None:
        if not self._torch.is_grad_enabled() or not self._optimizers or self._torch.compiler.is_compiling():
            return
        own = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        optimizer = next((held for held in self._optimizers if own & _held_by(held)), None)
        if optimizer is None:
            return
        self._torch.nn.Module.__call__ = self._call  # the outermost module comes first
        self._is_done = True
        import lowtide

        try:
            self._fit = lowtide.fit(module, budget=self._budget, optimizer=optimizer, **_offload(lowtide))
            self._why = ""
        except lowtide.LowtideError as error:
            self._why = str(error)

    def wait(self) -> None:
        """No step takes a GPU's time here: planning beside training would come many steps later than there."""
        if self._fit is None or self._fit.status().in_force or self._fit.status().steps < _WATCHED:
            return
        with contextlib.suppress(Exception):  # the status says why there is no plan
            self._fit.wait(_PLANNING_S)

    def facts(self) -> dict[str, Any]:
        self.wait()
        if self._fit is None:
            return {"in_force": False, "budget_bytes": None, "planned_steps": 0, "predicted_overhead": None,
                    "predicted_peak_bytes": None, "reasons": [self._why]}  # fmt: skip
        status = self._fit.status()
        plan = getattr(self._fit, "plan", None) if status.in_force else None
        return {
            "in_force": status.in_force,
            "budget_bytes": status.budget_bytes,
            "planned_steps": status.planned_steps,
            "predicted_overhead": getattr(plan, "predicted_overhead", None),
            "predicted_peak_bytes": getattr(plan, "predicted_peak_bytes", None),
            "reasons": list(status.reasons),
        }


def _offload(lowtide: ModuleType) -> dict[str, Any]:
    host_budget = os.environ.get("LOWTIDE_PRETEND_HOST_BUDGET", "")
    if not host_budget:
        return {}
    return {"offload": lowtide.Offload(host_budget=None if host_budget == "0" else host_budget)}


def _held_by(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def start(torch: ModuleType) -> None:
    from cuda_standin.script import record

    attachment = Attachment(torch, os.environ["LOWTIDE_BUDGET"])
    record.helpers.append(str(Path(__file__).parents[1]) + os.sep)
    record.before_write.append(lambda: record.facts.update(lowtide=attachment.facts()))
