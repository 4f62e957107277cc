"""Layers below everything that trains are part of the graph, because something made their inputs need gradients."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.outcome import distance
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.settings.carried_out import settings_kept

CHECK = Check(
    code="LT202",
    severity="waste",
    title="backward runs through frozen layers that nothing below needs",
    symptom="training the last layers costs as much as training all",
    source="transformers#19340, transformers#35826, ms-swift#10214 (enabling checkpointing hooks the embeddings)",
    mend="Call model.disable_input_require_grads() after checkpointing was switched on, with use_reentrant=False.",
    fix="model.disable_input_require_grads()",
)


def find(setup: StepUnderTest) -> Finding | None:
    hooked = [m for m in setup.model.modules() if vars(m).get("_require_grads_hooks")]
    if not hooked or setup.failure is not None:
        return None

    def unhooked() -> AbstractContextManager[None]:
        return _unhooked(setup.model, hooked)

    without = setup.run(unhooked())
    worst = max((distance(g, setup.as_it_is.gradients[n]) for n, g in without.gradients.items()), default=0.0)
    if worst > setup.rounding:
        return None  # the hook is needed
    change, now = setup.measured_under(unhooked), setup.measured
    if change.flops > 0.98 * now.flops:
        return None
    return CHECK.found(
        f"the inputs of {type(hooked[0]).__name__} are made to need gradients; without that the same gradients take "
        f"{100 * (1 - change.flops / now.flops):.0f} % fewer floating-point operations",
        gain=setup.gain(unhooked),
    )


@contextmanager
def _unhooked(model: nn.Module, modules: list[nn.Module]) -> Iterator[None]:
    """Inside, the hooks that make inputs need gradients are out of their modules."""
    with settings_kept(model):
        for module in modules:
            for handle in module._require_grads_hooks:
                handle.remove()
        yield
