"""Tensors of a step that something keeps, more with every step."""

from collections import Counter

from lowtide.doctor.finding import Check, Finding, Gain
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.units import format_bytes

CHECK = Check(
    code="LT207",
    severity="waste",
    title="tensors of past steps are kept, more with every step",
    symptom="out of memory hours in",
    source="verl#6984, peft#525, SpecForge#739",
    mend="Keep numbers, not tensors: loss.item(), or loss.detach() in a list that is emptied.",
)


def find(setup: StepUnderTest) -> Finding | None:
    if setup.failure is not None:
        return None
    once, twice = setup.held
    first, second = (sum(h.size_bytes for h in held) for held in (once, twice))
    if not once or second <= first or len(twice) < 2 * len(once):
        return None
    by_line = Counter[tuple[str, str]]()
    for held in twice:
        by_line[held.path, held.line] += held.size_bytes
    (path, line), size = by_line.most_common(1)[0]
    return CHECK.found(
        f"after a step {format_bytes(first)} of it live on, after two {format_bytes(second)}; most of it, "
        f"{format_bytes(size)}, was made at {line}",
        module=path,
        gain=Gain(second - first, note="and as much again with every further step"),
    )
