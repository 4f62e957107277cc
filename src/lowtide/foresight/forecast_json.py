"""A forecast as ``lowtide plan --json`` shows it."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from lowtide.foresight.forecast import Forecast
from lowtide.plan import Plan


def as_json(forecast: Forecast, parameters: int) -> dict[str, Any]:
    """As ``lowtide plan --json`` shows it, without limits and changes."""
    plan = forecast.plan
    return {
        "fits": forecast.fits,
        "verdict": forecast.verdict,
        "parameters": parameters,
        "peak_bytes": asdict(forecast.peak_bytes),
        "by_part": forecast.by_part,
        "host_bytes": forecast.host_bytes,
        "step_ms": forecast.step_ms and asdict(forecast.step_ms),
        "tokens_per_second": forecast.tokens_per_second,
        "plan": plan and _plan_json(plan),
        "setup": forecast.setup.as_json,
        "by_module": forecast.by_module,
        "assumptions": forecast.assumptions,
        "worst_rank": worst_rank(forecast),
        "stages": [asdict(stage) for stage in forecast.stages],
    }


def worst_rank(forecast: Forecast) -> str:
    """Which rank the answer is of, in words; ranks that share a layer hold alike, the first the largest parts."""
    setup = forecast.setup
    if setup.ranks == 1:
        return "the only one"
    if setup.stage is None:
        return "the first of each group"
    first, last = forecast.stages[setup.stage].layers if forecast.stages else (0, 0)
    return f"stage {setup.stage} of 0 to {setup.pipeline_parallel - 1} (layers {first} to {last}), its first"


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "counts": plan.counts,
        "overhead": plan.predicted_overhead,
        "gap": None if math.isnan(plan.gap) else plan.gap,
        "method": plan.method,
        "budget_bytes": plan.budget_bytes,
        "plain_peak_bytes": plan.plain_peak_bytes,
    }
