"""Attention that stores a score for every pair of positions."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.outcome import distance
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.units import format_bytes

CHECK = Check(
    code="LT206",
    severity="waste",
    title="eager attention stores the scores of every pair of positions",
    symptom="memory grows with the square of the sequence length",
    source="transformers 5.23 attn_implementation; unsloth#10815",
    mend='Load the model with attn_implementation="sdpa".',
    fix='model.set_attn_implementation("sdpa")',
)


def find(setup: StepUnderTest) -> Finding | None:
    config, choose = getattr(setup.model, "config", None), getattr(setup.model, "set_attn_implementation", None)
    eager = getattr(config, "_attn_implementation", None) == "eager"
    if not eager or choose is None or not getattr(setup.model, "_supports_sdpa", False) or setup.failure is not None:
        return None
    sdpa = partial(_with, choose, "sdpa")
    other = setup.run(sdpa())
    worst = max(distance(g, setup.as_it_is.gradients[n]) for n, g in other.gradients.items())
    change, now = setup.measured_under(sdpa), setup.measured
    if worst > 1e3 * setup.rounding or change.peak_bytes > 0.95 * now.peak_bytes:
        return None
    return CHECK.found(
        f"the peak of the step is {format_bytes(now.peak_bytes)}, with sdpa {format_bytes(change.peak_bytes)}; "
        f"gradients agree within {worst:.1e}",
        gain=setup.gain(sdpa),
    )


@contextmanager
def _with(choose: Any, name: str) -> Iterator[None]:
    choose(name)
    try:
        yield
    finally:
        choose("eager")
