"""``activation_memory_budget`` below one, around random operators.

With another budget the code is other code, which may draw other numbers from the same state. So gradients are compared
only where the loss is the same: then forward drew the same, and backward has to belong to it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch._functorch.config as functorch

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.outcome import distance
from lowtide.doctor.setup import Setup

CHECK = Check(
    code="LT010",
    severity="wrong",
    title="compiled code draws random numbers anew in backward (activation_memory_budget)",
    symptom="gradients belong to another dropout mask than the loss",
    source="pytorch#190758, pytorch#190717, torch-xpu-ops#4501",
    mend="Set activation_memory_budget to 1, or every dropout to 0.",
    fix="torch._functorch.config.activation_memory_budget = 1.0",
)


def look(setup: Setup) -> Finding | None:
    if not setup.is_compiled or functorch.activation_memory_budget >= 1 or setup.failure is not None:
        return None
    if setup.unsteady:
        return None
    torch._dynamo.reset()
    with _whole_budget():
        whole = setup.run()
    torch._dynamo.reset()
    if distance(setup.as_it_is.loss, whole.loss) > setup.rounding:
        setup.notes.append(f"{CHECK.code}: with a budget of 1 the loss is another, so gradients were not compared")
        return None
    far = {n: distance(setup.as_it_is.gradients[n], g) for n, g in whole.gradients.items()}
    worst = max(far, key=far.__getitem__)
    if far[worst] < 1e3 * setup.rounding:
        return None
    return CHECK.found(
        f"with activation_memory_budget={functorch.activation_memory_budget} the gradient of {worst} is "
        f"{100 * far[worst]:.3g} % off that with a budget of 1, from the same random state and at the same loss"
    )


@contextmanager
def _whole_budget() -> Iterator[None]:
    with functorch.patch(activation_memory_budget=1.0):
        yield
