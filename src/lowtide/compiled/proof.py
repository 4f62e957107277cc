"""Whether a variant of a layer gives the bits of the plain one, and how long a step of it takes."""

import math
import time
from collections.abc import Sequence
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch

from lowtide.compiled.captured_layer import CapturedLayer, Compiled, Variant
from lowtide.compiled.samples import copy_of, part_of, random_like
from lowtide.device import values_off
from lowtide.device.generators import forked, state_of
from lowtide.device.timing import calls_ms
from lowtide.step.bits import same_bits

_SAMPLES, _SAMPLED_MS = 6, 300.0  # of each variant, at least
_ERROR = 0.01  # of the median ratio, at which no more samples are taken
_MOST_MS = 4000.0  # of each variant, whatever its error
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
    """Time forward and backward of ``others`` on their device, each between two runs of ``plain``; the median of the
    ratios to these two becomes ``step_ms``, in the measure of ``plain.step_ms``, which is set where it is not there.

    A machine that others use as well changes its speed from one run to the next. The least of each variant's samples
    would be off by 4 %, as much as variants differ by, however many there are. The ratios show their error, and more
    samples are taken until it is small.

    All have run before, to be proven. Of a small layer the first turns are slow all the same, so it takes more of them.

    Where kernels do nothing, a variant's time is that of its code on a device of the table.
    """
    if values_off.times_of:
        for variant in (plain, *others):
            variant.step_ms = variant.code_ms
        return
    device = captured.device
    with forked(device), captured.ambient.entered(), captured.alone():
        inputs = captured.sample_inputs()

        def run_ms(variant: Variant) -> float:
            return calls_ms(partial(_results, _runnable(variant), inputs, device), 1, device, time.process_time)

        timed = others or [plain]
        ratios: list[list[float]] = [[] for _ in timed]
        plain_ms, spent_ms = [run_ms(plain)], 0.0
        while not _is_enough(ratios, spent_ms / len(timed)):
            for variant, found in zip(timed, ratios, strict=True):
                ms = run_ms(variant)
                plain_ms.append(run_ms(plain))
                found.append(2 * ms / sum(plain_ms[-2:]))
                spent_ms += ms
    plain.step_ms = plain.step_ms or median(plain_ms)
    for variant, found in zip(others, ratios):
        variant.step_ms = median(found) * plain.step_ms


def _is_enough(ratios: Sequence[Sequence[float]], spent_ms: float) -> bool:
    turns = len(ratios[0])
    if spent_ms >= _MOST_MS:
        return True
    return turns >= _SAMPLES and spent_ms >= _SAMPLED_MS and max(map(_error, ratios)) <= _ERROR


def _error(ratios: Sequence[float]) -> float:
    """Standard error of the median of normal numbers with such quartiles."""
    first, middle, third = quantiles(ratios, n=4)
    return 0.93 * (third - first) / (middle * math.sqrt(len(ratios)))


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
