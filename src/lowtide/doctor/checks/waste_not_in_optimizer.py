"""Gradients are computed for parameters that no optimizer has."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.units import format_bytes

CHECK = Check(
    code="LT209",
    severity="wrong",
    title="trainable parameters that the optimizer does not have",
    symptom="they never move, and their gradients grow with every step that zero_grad of the optimizer passes over",
    source="pytorch optim docs; parameters added or replaced after the optimizer was made",
    mend="Make the optimizer after the last change of the model, or freeze what shall not train.",
)


def find(setup: StepUnderTest) -> Finding | None:
    if setup.optimizer is None:
        return None
    known = {id(p) for group in setup.optimizer.param_groups for p in group["params"]}
    outcome = setup.plain if setup.failure is not None else setup.as_it_is
    missing = [n for n, p in setup.trainable.items() if id(p) not in known and outcome.gradients.get(n) is not None]
    if not missing:
        return None
    size = sum(setup.trainable[n].nbytes for n in missing)
    return CHECK.found(
        f"{len(missing)} of {len(setup.trainable)} parameters get gradients ({format_bytes(size)}) and stand in no "
        f"group of the optimizer; the first is {missing[0]}",
        module=missing[0].rpartition(".")[0],
        fix=f"optimizer.add_param_group({{'params': [model.get_parameter(name) for name in {missing}]}})",
    )
