"""Recomputing takes another path: other operators, or other shapes."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.doctor.value_proof import first_divergence

CHECK = Check(
    code="LT009",
    severity="wrong",
    title="recomputing fails: it takes another path than forward did",
    symptom="CheckpointError: different metadata, or another number of saved tensors",
    source="torchtitan#1117, Automodel#2635, NeMo-RL#1203, pytorch#166926 (routers, counters, hooks, caches)",
    mend="Make what decides the path the same in both runs: compute the routing outside of the checkpointed call, keep "
    "hooks and counters still until backward has ended.",
)


def find(setup: StepUnderTest) -> Finding | None:
    if setup.failure is None or not setup.calls or not any(c.recomputed for c in setup.calls):
        return None
    found = first_divergence(setup)
    where = f"; first divergence: {found}" if found else ""
    message = str(setup.failure).strip().splitlines()[0]
    return CHECK.found(
        f"{type(setup.failure).__name__}: {message} Without checkpointing the step runs{where}",
        module=found.call.path if found else "",
    )
