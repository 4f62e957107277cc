"""Whether a variant of a layer gives the bits of the plain one, and how long a step of it takes."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from lowtide.compiled.captured_layer import CapturedLayer, Compiled, Variant
from lowtide.device.generators import forked
from lowtide.step.bits import same_bits

_SAMPLES, _SAMPLED_S = 3, 0.3  # of each variant, at least
_SEED = 0


def why_not_equal(captured: CapturedLayer, variant: Variant, plain: Variant) -> str:
    """Run both on the same inputs and compare outputs, gradients, inputs and generator; "" where all bits agree."""
    with forked(torch.device("cpu")), captured.ambient.entered():
        torch.manual_seed(_SEED)
        inputs = captured.sample_inputs()
        found = [_results(_runnable(v), [_copy(t) for t in inputs]) for v in (variant, plain)]
    for (name, mine), (_, theirs) in zip(*found, strict=True):
        if (mine is None) != (theirs is None):
            return f"{name} is missing in one of them"
        if mine is not None and theirs is not None and not same_bits(mine, theirs):
            return f"{name} has other bits than in the plain compiled layer"
    return ""


def measure_ms(captured: CapturedLayer, variants: Sequence[Variant]) -> None:
    """Time forward and backward of each on the processor, in turns; the least sample becomes its ``step_ms``.

    The first turn only warms up. It compiles what is compiled at the first backward, which would use up the time for
    samples: a small layer would then be known by three cold ones.
    """
    taken: dict[str, list[float]] = {v.name: [] for v in variants}
    with forked(torch.device("cpu")), captured.ambient.entered():
        inputs = captured.sample_inputs()
        for variant in variants:
            _results(_runnable(variant), inputs)
        while len(taken[variants[0].name]) < _SAMPLES or sum(map(sum, taken.values())) < _SAMPLED_S * len(variants):
            for variant in variants:
                start = time.process_time()
                _results(_runnable(variant), inputs)
                taken[variant.name].append(time.process_time() - start)
    for variant in variants:
        variant.step_ms = min(taken[variant.name]) * 1e3


def _runnable(variant: Variant) -> Compiled:
    assert variant.run is not None
    return variant.run


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Parameters as they are; anything else anew: compiled code may write it."""
    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    with torch.no_grad():
        made.copy_(tensor)
    return made.requires_grad_(tensor.requires_grad)


def _results(run: Compiled, inputs: list[torch.Tensor]) -> list[tuple[str, torch.Tensor | None]]:
    """Everything that one step of the layer gives, by name."""
    torch.manual_seed(_SEED)
    with torch.enable_grad():
        outputs = [t for t in run(*inputs) if isinstance(t, torch.Tensor)]
    differentiable = [t for t in outputs if t.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    directions = [torch.randn(t.shape).to(t.dtype) for t in differentiable]
    gradients: Sequence[Any] = ()
    if differentiable:
        gradients = torch.autograd.grad(differentiable, wanted, directions, allow_unused=True)
    found: list[tuple[str, torch.Tensor | None]] = [(f"output {i}", t.detach()) for i, t in enumerate(outputs)]
    found += [(f"gradient {i}", t) for i, t in enumerate(gradients)]
    found += [(f"input {i}", t.detach()) for i, t in enumerate(inputs)]
    return [*found, ("the random generator", torch.get_rng_state())]
