"""``activation_memory_budget`` below one, around random operators.

Code that is compiled under another budget may draw other numbers from the same state, so the two say nothing about each
other. A gradient has to belong to its own loss: the loss is computed a little up and a little down along it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch._functorch.config as functorch

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT010",
    severity="wrong",
    title="compiled code draws random numbers anew in backward (activation_memory_budget)",
    symptom="gradients belong to another dropout mask than the loss",
    source="pytorch#190758, pytorch#190717, torch-xpu-ops#4501",
    mend="Set activation_memory_budget to 1, or every dropout to 0.",
    fix="torch._functorch.config.activation_memory_budget = 1.0",
)
_CHANGE = 1e-3  # of the loss, up and down together, by what the gradient says
_COARSE = 1e-4  # rounding of the step from which on such a change drowns in it
_OFF = 0.02  # right gradients are within 1e-4


def find(setup: StepUnderTest) -> Finding | None:
    if not setup.is_compiled or functorch.activation_memory_budget >= 1 or setup.failure is not None:
        return None
    if setup.unsteady:
        return None
    if setup.rounding > _COARSE:
        coarse = setup.seen.least_precise
        setup.notes.append(
            f"{CHECK.code}: the step computes in {coarse}, too coarse to hold gradients against the loss"
        )
        return None
    gradients = {n: g for n, g in setup.as_it_is.gradients.items() if g is not None}
    loss = abs(float(setup.as_it_is.loss))
    square = sum(float(g.double().square().sum()) for g in gradients.values())
    if not loss or not square:
        return None
    by = _CHANGE * loss / (2 * square)
    up, down = (float(setup.run(_moved(setup, gradients, sign * by)).loss) for sign in (1, -1))
    ratio = (up - down) / (2 * by * square)
    if abs(ratio - 1) < _OFF:
        return None
    return CHECK.found(
        f"with activation_memory_budget={functorch.activation_memory_budget} a small step along the gradient changes "
        f"the loss by {ratio:.2f} of what the gradient says, from the same random state"
    )


@contextmanager
def _moved(setup: StepUnderTest, gradients: dict[str, torch.Tensor], by: float) -> Iterator[None]:
    """Inside, trainable parameters are so many gradients further."""
    before = {name: p.detach().clone() for name, p in setup.trainable.items()}
    with torch.no_grad():
        for name, gradient in gradients.items():
            setup.trainable[name].add_(gradient.to(setup.trainable[name].device), alpha=by)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, content in before.items():
                setup.trainable[name].copy_(content)
