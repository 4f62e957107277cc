"""A fitted model whose last step did not run under a plan."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.setup import Setup

CHECK = Check(
    code="LT303",
    severity="waste",
    title="lowtide's plan is not in force",
    symptom="steps run without a plan",
    source="fit.status()",
    mend="See fit.status().reasons; fit.wait() waits for the plan.",
    fix="fit.wait()",
)


def look(setup: Setup) -> Finding | None:
    for model in (setup.wrapper, setup.model):
        counters = getattr(model._compiled_call_impl, "counters", None)
        if counters is not None and counters.steps and counters.why_not_planned:
            return CHECK.found(
                f"{counters.planned_steps} of {counters.steps} steps ran under a plan; the last one did not: "
                f"{counters.why_not_planned}"
            )
    return None
