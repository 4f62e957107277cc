"""Whether a variant of a layer gives the bits of the plain one, and how long a step of it takes."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from lowtide.compiled.captured_layer import CapturedLayer, Compiled, Variant
from lowtide.compiled.samples import copy_of, part_of, random_like
from lowtide.device import values_off
from lowtide.device.generators import forked, state_of
from lowtide.device.timing import calls_ms
from lowtide.step.bits import same_bits

_SAMPLES, _SAMPLED_MS = 3, 300.0  # of each variant, at least, after the first
_ENOUGH_MS = 600.0  # of each variant: no more samples are taken
_SEED = 0


def why_not_equal(captured: CapturedLayer, variants: Sequence[Variant], plain: Variant) -> list[str]:
    """Run all on the same inputs and compare outputs, gradients, inputs and generator of each with those of ``plain``;
    "" where all bits agree."""
    with forked(captured.device), captured.ambient.entered(), captured.alone():
        torch.manual_seed(_SEED)
        inputs = captured.sample_inputs()

        def results(variant: Variant) -> list[tuple[str, torch.Tensor | None]]:
            return _results(_runnable(variant), [_copy(t) for t in inputs], captured.device)

        expected = results(plain)  # meanwhile compilers may be at the others' kernels
        return [_difference(results(variant), expected) for variant in variants]


def _difference(found: list[tuple[str, torch.Tensor | None]], expected: list[tuple[str, torch.Tensor | None]]) -> str:
    for (name, mine), (_, theirs) in zip(found, expected, strict=True):
        if (mine is None) != (theirs is None):
            return f"{name} is missing in one of them"
        if mine is not None and theirs is not None and not same_bits(mine, theirs):
            return f"{name} has other bits than in the plain compiled layer"
    return ""


def measure_ms(captured: CapturedLayer, plain: Variant, others: Sequence[Variant]) -> None:
    """Time forward and backward of ``others`` on their device, in turns with ``plain``; the least sample becomes
    ``step_ms``. Where ``plain`` has been timed before, its time stays, and the others are in its measure.

    All have run before, to be proven. Of a small layer the first turn is slow all the same, so it takes more of them.

    Where kernels do nothing, a variant's time is that of its code on a device of the table.
    """
    variants = [plain, *others]
    if values_off.times_of:
        for variant in variants:
            variant.step_ms = variant.code_ms
        return
    taken: dict[str, list[float]] = {v.name: [] for v in variants}
    device = captured.device
    with forked(device), captured.ambient.entered(), captured.alone():
        inputs = captured.sample_inputs()
        while not _is_enough(len(taken[plain.name]), sum(map(sum, taken.values())) / len(variants)):
            for variant in variants:
                step = partial(_results, _runnable(variant), inputs, device)
                taken[variant.name].append(calls_ms(step, 1, device, time.process_time))
    now_ms = min(taken[plain.name])
    plain.step_ms = plain.step_ms or now_ms
    for variant in others:
        variant.step_ms = min(taken[variant.name]) * plain.step_ms / now_ms


def _is_enough(turns: int, spent_ms: float) -> bool:
    return spent_ms >= _ENOUGH_MS or (turns > _SAMPLES and spent_ms >= _SAMPLED_MS)


def _runnable(variant: Variant) -> Compiled:
    assert variant.run is not None
    variant.kernels.compile()
    return variant.run


def _copy(value: Any) -> Any:
    """Parameters and sizes as they are; anything else anew: compiled code may write it."""
    return copy_of(value) if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) else value


def _results(run: Compiled, inputs: list[Any], device: torch.device) -> list[tuple[str, torch.Tensor | None]]:
    """Everything that one step of the layer gives, by name."""
    torch.manual_seed(_SEED)
    with torch.enable_grad():
        outputs = [t for t in run(*inputs) if isinstance(t, torch.Tensor)]
    differentiable = [t for t in outputs if t.requires_grad]
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    wanted = [t for t in tensors if t.requires_grad]
    directions = [random_like(t) for t in differentiable]
    gradients: Sequence[Any] = ()
    if differentiable:
        gradients = torch.autograd.grad(differentiable, wanted, directions, allow_unused=True)
    found: list[tuple[str, torch.Tensor | None]] = [(f"output {i}", part_of(t).detach()) for i, t in enumerate(outputs)]
    found += [(f"gradient {i}", t if t is None else part_of(t)) for i, t in enumerate(gradients)]
    found += [(f"input {i}", part_of(t).detach()) for i, t in enumerate(tensors)]
    return [*found, ("the random generator", state_of(device))]
