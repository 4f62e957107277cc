"""lowtide: the fastest PyTorch training step that fits the memory it has.

The public names, loaded when first used.
"""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.api import Fit, fit
    from lowtide.costs.measurer import measure
    from lowtide.errors import (
        BudgetInfeasibleError,
        GraphFormatError,
        LowtideError,
        PlanMismatchError,
        ReplayError,
        StepError,
        TierError,
        UnsupportedModelError,
    )
    from lowtide.graph.costs import Costs
    from lowtide.graph.step_graph import StepGraph
    from lowtide.plan import Plan
    from lowtide.simulator import Timeline, simulate
    from lowtide.solvers.front_door import solve
    from lowtide.solvers.pareto import FrontierPoint, frontier
    from lowtide.tape.attach import apply
    from lowtide.tracing.tracer import trace
    from lowtide.verifier import Verification, verify

__version__ = "0.1.0"

_HOME = {
    "fit": "api", "Fit": "api",
    "trace": "tracing.tracer",
    "measure": "costs.measurer",
    "solve": "solvers.front_door",
    "frontier": "solvers.pareto", "FrontierPoint": "solvers.pareto",
    "simulate": "simulator", "Timeline": "simulator",
    "apply": "tape.attach",
    "verify": "verifier", "Verification": "verifier",
    "Plan": "plan", "StepGraph": "graph.step_graph", "Costs": "graph.costs",
    "LowtideError": "errors", "BudgetInfeasibleError": "errors", "PlanMismatchError": "errors",
    "ReplayError": "errors", "StepError": "errors", "UnsupportedModelError": "errors", "GraphFormatError": "errors",
    "TierError": "errors",
}  # fmt: skip

__all__ = [
    "BudgetInfeasibleError", "Costs", "Fit", "FrontierPoint", "GraphFormatError", "LowtideError", "Plan",
    "PlanMismatchError", "ReplayError", "StepError", "StepGraph", "TierError", "Timeline", "UnsupportedModelError",
    "Verification", "apply", "fit", "frontier", "measure", "simulate", "solve", "trace", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    state = random.getstate()  # rich draws from it when imported; a fit must leave every generator as it was
    try:
        return getattr(importlib.import_module(f"lowtide.{_HOME[name]}"), name)
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return sorted(__all__)
