"""A module that is checkpointed inside a checkpoint of the same module."""

from contextlib import AbstractContextManager
from typing import Any

from lowtide.doctor import checkpoint_seam
from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT107",
    severity="waste",
    title="a module is checkpointed twice: it runs three times a step",
    symptom="checkpointing costs twice what it should",
    source="unsloth#2362; Lightning#19919; checkpoint_wrapper on a model whose own flag is on",
    mend="Leave one of them out: the wrapper, or the model's own flag; or use_reentrant=False for both.",
    fix="model.gradient_checkpointing_disable()",
)


def find(setup: StepUnderTest) -> Finding | None:
    inner = [c for c in setup.calls if c.parent is not None and _is_the_same(c.path, c.parent.path)]
    if not inner or setup.failure is not None:
        return None

    def once() -> AbstractContextManager[Any]:
        return checkpoint_seam.plain_calls({c.number for c in inner})

    now, mended = setup.measured.flops, setup.measured_under(once).flops
    if now <= mended:  # two that are not reentrant stop early, and nothing runs a third time
        return None
    return CHECK.found(
        f"{len({c.path for c in inner})} modules are checkpointed inside a checkpoint of themselves; the step does "
        f"{now / mended:.2f} times the floating-point operations that it does with the outer ones alone",
        module=inner[0].path,
        gain=setup.gain(once),
    )


def _is_the_same(inner: str, outer: str) -> bool:
    """Wrappers have names that begin with an underscore."""
    names = [p for p in inner.removeprefix(outer).split(".") if p]
    return inner.startswith(outer) and (not names or all(n.startswith("_") for n in names))
