"""The numbers of a fit that stand beside the losses, in TensorBoard, Weights & Biases, MLflow and their like."""

from lowtide.compiled.compiled_model import CompiledModel
from lowtide.training.fitted_model import Fit


def metrics_of(fit: Fit | CompiledModel) -> dict[str, float]:
    """What is known so far; loggers refuse None. Bytes are absolute, as the allocator counts them."""
    status, plans = fit.status(), fit.plans
    known = {
        "lowtide_budget_bytes": status.budget_bytes,
        "lowtide_last_peak_bytes": status.last_peak_bytes,
        "lowtide_observed_peak_bytes": status.observed_peak_bytes,
        "lowtide_excess_bytes": status.excess_bytes,
        "lowtide_over_budget_steps": status.over_budget_steps,
        "lowtide_planned_steps": status.planned_steps,
        "lowtide_overhead": plans[-1].predicted_overhead if plans else None,
        "lowtide_plans": len(plans),
    }
    return {name: value for name, value in known.items() if value is not None}
