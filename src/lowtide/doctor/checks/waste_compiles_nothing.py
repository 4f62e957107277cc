"""``module.compile()`` on modules that are PyTorch's own code through and through.

Whether the PyTorch that runs leaves them uncompiled is tried: later ones begin at a frame around the call.
"""

import functools

import torch
from torch import nn

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.step_under_test import StepUnderTest
from lowtide.step.module_calls import compiled_parts, is_pytorchs_own

CHECK = Check(
    code="LT214",
    severity="waste",
    title="module.compile() compiles nothing, as all of the module is PyTorch's own code",
    symptom="no step is faster, and nothing says so",
    source="pytorch#150915, pytorch#132923",
    mend="Compile such a module by torch.compile(module), or call compile() on a module of your own around it.",
)


def find(setup: StepUnderTest) -> Finding | None:
    left = [path for path in compiled_parts(setup.model) if _is_left(setup.model.get_submodule(path))]
    if not left or _compiles_own_modules():
        return None
    named = ", ".join(path or "the model" for path in left[:3]) + (", ..." if len(left) > 3 else "")
    return CHECK.found(
        f"{named}: compile() was called on {len(left)} module{'s' if len(left) > 1 else ''} of PyTorch's own code "
        f"alone, of which PyTorch {torch.__version__} compiles nothing"
    )


def _is_left(part: nn.Module) -> bool:
    return part._compiled_call_impl is not None and all(map(is_pytorchs_own, part.modules()))


@functools.cache
def _compiles_own_modules() -> bool:
    asked: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        asked.append(len(inputs))
        return graph

    module = nn.Linear(1, 1)
    module.compile(backend=backend)
    module(torch.ones(1))
    return bool(asked)
