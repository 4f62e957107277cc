"""Reentrant checkpoints in DDP."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT301",
    severity="risk",
    title="reentrant checkpoints under DDP",
    symptom="'Expected to mark a variable ready only once'",
    source="pytorch#24005, peft#313, accelerate#2017",
    mend="Use use_reentrant=False.",
    fix='gradient_checkpointing_kwargs={"use_reentrant": False}',
)


def find(setup: StepUnderTest) -> Finding | None:
    reentrant = [c for c in setup.calls if c.reentrant]
    if setup.ddp is None or not reentrant:
        return None
    uses = [c.path for c in reentrant if c.parent is None]
    twice = sorted({p for p in uses if uses.count(p) > 1})
    if setup.ddp.find_unused_parameters:
        why = "find_unused_parameters=True marks their parameters ready before backward gives them a gradient"
    elif twice and not setup.ddp.static_graph:
        why = f"{twice[0]} is checkpointed {uses.count(twice[0])} times a step, and its gradients come that often"
    else:
        return None
    return CHECK.found(f"{len(reentrant)} reentrant checkpoints; {why}", module=reentrant[0].path)
