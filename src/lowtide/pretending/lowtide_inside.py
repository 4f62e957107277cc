"""Runs in the script's own process with ``--budget``: lowtide is attached to the first model that is trained.

Loaded by path (``cuda_standin.script``). The model is the outermost module that is called with gradients while an
optimizer holds its parameters; it is fitted before that call. The loop is not known, so the first step is watched.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any


class Attachment:
    """The fit of the script's model, or why there is none."""

    def __init__(self, torch: ModuleType, budget: str) -> None:
        self._torch = torch
        self._budget: int | str = int(budget) if budget.isdecimal() else budget
        self._optimizers: list[Any] = []
        self._fit: Any = None
        self._why = "no module was called in training whose parameters an optimizer holds"
        make = torch.optim.Optimizer.__init__

        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            self._optimizers.append(optimizer)

        torch.optim.Optimizer.__init__ = made
        self._handle = torch.nn.modules.module.register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: Any, args: Any) -> None:
        if not self._torch.is_grad_enabled() or not self._optimizers or self._torch.compiler.is_compiling():
            return
        own = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        held = (p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"])
        optimizer = next(
            (o for o in self._optimizers if any(id(p) in own for g in o.param_groups for p in g["params"])), None
        )
        if optimizer is None or not any(id(parameter) in own for parameter in held):
            return
        self._handle.remove()  # the outermost module comes first
        import lowtide

        try:
            self._fit = lowtide.fit(module, budget=self._budget, optimizer=optimizer)
            self._why = ""
        except lowtide.LowtideError as error:
            self._why = str(error)

    def facts(self) -> dict[str, Any]:
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


def start(torch: ModuleType) -> None:
    from cuda_standin.script import record

    attachment = Attachment(torch, os.environ["LOWTIDE_BUDGET"])
    record.before_write.append(lambda: record.facts.update(lowtide=attachment.facts()))
