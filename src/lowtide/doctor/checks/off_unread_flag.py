"""A module's flag is on, the module runs in train mode, and nothing is checkpointed."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.settings.carried_out import checkpointed_modules
from lowtide.units import format_bytes

CHECK = Check(
    code="LT102",
    severity="waste",
    title="a checkpointing flag is on that no code reads",
    symptom="the flag changes no number",
    source="verl#26, Soup#796, LlamaFactory#6232",
    mend="Call torch.utils.checkpoint in that module's forward, or switch it on by the model's own method.",
)


def find(setup: StepUnderTest) -> Finding | None:
    if setup.calls or setup.is_compiled or not setup.flagged:
        return None
    unread = [n for n in setup.flagged if setup.model.get_submodule(n).training and setup.seen.called[n]]
    leaves = [n for n in unread if not any(o != n and o.startswith(f"{n}." if n else "") for o in setup.flagged)]
    if not leaves:
        return None
    stored = sum(s.size_bytes for s in setup.seen.stored.values())
    flagged = "1 module has" if len(leaves) == 1 else f"{len(leaves)} modules have"
    return CHECK.found(
        f"{flagged} gradient_checkpointing=True and ran in train mode; no call was checkpointed, and "
        f"the step stores {format_bytes(stored)} for backward",
        module=leaves[0],
        gain=setup.gain(lambda: checkpointed_modules([setup.model.get_submodule(n) for n in leaves])),
    )
