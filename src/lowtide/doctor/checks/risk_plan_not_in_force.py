"""A fitted model, or one of ``lowtide.compile``, whose last step did not run under a plan."""

from typing import Any

from lowtide.doctor.finding import Check, Finding, Gain
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.errors import LowtideError
from lowtide.measurement.op_times import measure
from lowtide.options import FitOptions
from lowtide.plan import Plan
from lowtide.solvers.dispatch import solve
from lowtide.tape.attach import apply
from lowtide.tracing.sources import trace
from lowtide.training.budget import StepBudget

CHECK = Check(
    code="LT303",
    severity="waste",
    title="lowtide's plan is not in force",
    symptom="steps run without a plan",
    source="fit.status()",
    mend="See fit.status().reasons; fit.wait() waits for the plan.",
    fix="fit.wait()",
)


def find(setup: StepUnderTest) -> Finding | None:
    for model in (setup.wrapper, setup.model):
        own_call: Any = model._compiled_call_impl
        counters = getattr(own_call, "counters", None)
        if counters is not None and counters.steps and counters.why_not_planned:
            return CHECK.found(
                f"{counters.planned_steps} of {counters.steps} steps ran under a plan; the last one did not: "
                f"{counters.why_not_planned}",
                gain=_gain(setup, getattr(own_call, "options", None)),
            )
    return None


def _gain(setup: StepUnderTest, asked: FitOptions | None) -> Gain:
    """Of a plan for this step within the fit's budget; the fit's own plans stay as they are."""
    if asked is None:
        return Gain(why_not="lowtide.compile plans from steps that it has watched")
    try:
        with setup.preserved():
            plan = _plan(setup, asked)
    except LowtideError as error:
        return Gain(why_not=f"there is no plan for this step: {str(error).splitlines()[0]}")
    return setup.gain(lambda: apply(setup.model, plan))


def _plan(setup: StepUnderTest, asked: FitOptions) -> Plan:
    graph = trace(setup.model, setup.batch, step=setup.step, optimizer=asked.optimizer)
    costs = measure(graph)
    budget_bytes = StepBudget(setup.model, asked.budget, asked.optimizer).fixed_for(graph, costs)
    return solve(graph, costs, budget_bytes, method=asked.method, **asked.solver)
