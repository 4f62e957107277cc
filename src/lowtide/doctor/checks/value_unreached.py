"""Trainable modules that the step never calls, or whose result the loss does not depend on."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.units import format_bytes

CHECK = Check(
    code="LT006",
    severity="risk",
    title="trainable parameters that this step gives no gradient",
    symptom="a tower stays as it was; its optimizer state takes memory; DDP waits or asks for unused parameters",
    source="trl#6617, unsloth#5039, Qwen-VL-Series-Finetune#193",
    mend="Freeze it (requires_grad_(False)) if it is not meant to train; else give it data, or look for a detach, a "
    "no_grad or an adapter on the wrong tower.",
)


def find(setup: StepUnderTest) -> Finding | None:
    outcome = setup.plain if setup.failure is not None else setup.as_it_is
    plain = setup.plain.gradients if setup.calls else outcome.gradients
    without = [n for n, g in plain.items() if g is None]
    if not without:
        return None
    trained = set(plain) - set(without)
    wholes = {n: _outermost(n, trained) for n in without}
    top = wholes[without[0]]
    size = sum(setup.trainable[n].nbytes for n in without)
    never = not any(path == top or path.startswith(f"{top}.") for path in setup.seen.called) if top else False
    how = "is never called" if never else "gets no gradient"
    return CHECK.found(
        f"{top or without[0]} {how}: {len(without)} of {len(plain)} trainable parameters, {format_bytes(size)}, and as "
        "much again for each state of the optimizer",
        module=top,
        fix="\n".join(_frozen(wholes)),
    )


def _frozen(wholes: dict[str, str]) -> list[str]:
    modules = list(dict.fromkeys(path for path in wholes.values() if path))
    alone = [name for name, path in wholes.items() if not path]
    lines = [f"for path in {modules}:\n    model.get_submodule(path).requires_grad_(False)"] if modules else []
    return lines + ([f"for name in {alone}:\n    model.get_parameter(name).requires_grad_(False)"] if alone else [])


def _outermost(name: str, trained: set[str]) -> str:
    """The outermost module around a parameter of which no parameter has a gradient; "" where there is none."""
    parts = name.split(".")[:-1]
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if not any(n.startswith(f"{path}.") for n in trained):
            return path
    return ""
