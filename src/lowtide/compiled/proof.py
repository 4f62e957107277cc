"""Whether a variant of a layer gives the bits of the plain one, and how long a step of it takes."""

import math
import time
from collections.abc import Sequence
from functools import partial
from statistics import fmean, median
from typing import Any

import torch

from lowtide.compiled.captured_layer import OTHER_ORDER, CapturedLayer, Compiled, Variant
from lowtide.compiled.samples import copy_of, part_of, random_like
from lowtide.device import values_off
from lowtide.device.generators import forked, state_of
from lowtide.device.timing import calls_ms
from lowtide.step.bits import same_bits

_SAMPLED_MS = 300.0  # of each variant, at least
_LEAST_SAMPLES, _MOST_MS = 2, 2000.0  # where they take so long: of each variant, whatever its error
_LEAST_FREEDOM = 4  # degrees of freedom of the spread, before it is believed to be small
_PLAIN_SAMPLES = 3  # where the plain variant is timed alone: all others' times are ratios to it, taken beside it later
_ERROR, _ERROR_OF_EXTRA = 0.015, 0.1  # of the median ratio, and of what it is beyond 1: no more samples are taken
_ROUNDINGS, _MOST_PROOFS = 1 << 28, 64  # in low precision: so many rounded values are compared, in so many samples
_PROOFS_OF_NAN = 4  # samples at least, where some result is no number on any of them
_Results = list[tuple[str, torch.Tensor | None]]


def why_not_equal(
    captured: CapturedLayer, variants: Sequence[Variant], plain: Variant, *, at_most: int = _MOST_PROOFS
) -> list[str]:
    """Run all on the same inputs and compare outputs, gradients, inputs and generator of each with those of ``plain``;
    "" where all bits agree. What is refused already does not run.

    In low precision one sample says little: a value that one variant rounds and another does not shows where a later
    rounding does not hide it, in a small layer perhaps nowhere. So there are several, and inputs that have no gradient
    have other values in every second: the masks of one call say nothing of the next.

    Args:
        at_most: So many samples.
    """
    reasons, known = [variant.refused for variant in variants], set[str]()
    if all(reasons):
        return reasons
    with forked(captured.device), captured.ambient.entered(), captured.alone():
        for number in range(at_most):
            torch.manual_seed(number)
            inputs = captured.sample_inputs(as_trained=True, other=number % 2 == 1)

            def results(variant: Variant, inputs: list[Any] = inputs, seed: int = number) -> _Results:
                return _results(_runnable(variant), [_copy(t) for t in inputs], captured.device, [], seed)

            expected = results(plain)  # meanwhile compilers may be at the others' kernels
            known.update(name for name, tensor in expected if name not in known and _has_numbers(tensor))
            for at, variant in enumerate(variants):
                reasons[at] = reasons[at] or _difference(results(variant), expected)
            unknown = [name for name, _ in expected if name not in known]
            if all(reasons) or number + 1 >= max(_num_proofs(captured.roundings), _PROOFS_OF_NAN if unknown else 1):
                break
    if captured.roundings and not values_off.are_off:
        reasons = [r or OTHER_ORDER * (not v.adds_up_as(plain)) for r, v in zip(reasons, variants, strict=True)]
    if unknown:
        reasons = [r or f"{unknown[0]} of the plain compiled layer is no number on any sample" for r in reasons]
    return reasons


def _num_proofs(roundings: int) -> int:
    if not roundings or values_off.are_off:
        return 1
    return min(_MOST_PROOFS, max(2, math.ceil(_ROUNDINGS / roundings)))


def _has_numbers(tensor: torch.Tensor | None) -> bool:
    """Comparing it says something: it is not NaN throughout, as what a fully masked row reaches."""
    if tensor is None or not tensor.numel() or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return True
    return values_off.are_off or bool(tensor.isfinite().any())


def _difference(found: _Results, expected: _Results) -> str:
    for (name, mine), (_, theirs) in zip(found, expected, strict=True):
        if (mine is None) != (theirs is None):
            return f"{name} is missing in one of them"
        if mine is not None and theirs is not None and not same_bits(mine, theirs):
            return f"{name} has other bits than in the plain compiled layer"
    return ""


def measure_ms(captured: CapturedLayer, plain: Variant, others: Sequence[Variant]) -> None:
    """Time forward and backward of ``others`` on their device, in turns between two runs of ``plain``. The median of
    the ratios to these two becomes ``step_ms``, in the measure of ``plain.step_ms``, which is set where it is missing.

    A machine that others use as well changes its speed from one run to the next. The least of each variant's samples
    would be off by 4 %, as much as variants differ by, however many there are. The ratios show their error, and a
    variant is sampled until that is small. The machine is what spreads them, so all samples together give one spread. A
    large layer leaves time for few of each variant, which often agree by luck.

    All have run before, to be proven. Of a small layer the first turns are slow all the same, so it takes more of them.

    Where kernels do nothing, a variant's time is that of its code on a device of the table.
    """
    if values_off.times_of:
        for variant in (plain, *others):
            variant.step_ms = variant.code_ms
        return
    device = captured.device
    with forked(device), captured.ambient.entered(), captured.alone():
        inputs, directions = captured.sample_inputs(), list[torch.Tensor]()

        def run_ms(variant: Variant) -> float:
            step = partial(_results, _runnable(variant), inputs, device, directions)
            return calls_ms(step, 1, device, time.process_time)

        taken = [_Taken(variant) for variant in others]
        plain_ms, spread = [run_ms(plain)], math.inf
        while not others and (len(plain_ms) < _PLAIN_SAMPLES or sum(plain_ms) < _SAMPLED_MS):
            plain_ms.append(run_ms(plain))
        while wanted := [one for one in taken if not one.is_enough(spread)]:
            took_ms = [run_ms(one.variant) for one in wanted]
            plain_ms.append(run_ms(plain))
            before_ms, after_ms = plain_ms[-2:]
            for place, (one, ms) in enumerate(zip(wanted, took_ms, strict=True), start=1):
                one.add(ms, before_ms + (after_ms - before_ms) * place / (len(wanted) + 1))
            spread = _spread(taken, plain_ms, _LEAST_FREEDOM)
    plain.step_ms = plain.step_ms or median(plain_ms)
    spread = _spread(taken, plain_ms)
    for one in taken:
        one.variant.step_ms, one.variant.error = median(one.ratios) * plain.step_ms, one.error(spread)


def _spread(taken: Sequence["_Taken"], plain_ms: Sequence[float], least_freedom: int = 1) -> float:
    """Standard deviation of a sample, as a share of its variant's mean; infinite where too few are known.

    It is that of normal numbers with such a mean deviation, which a disturbed sample raises less than their squares.
    Plain runs count as well, as ratios to the mean of the two beside them, which would be 1.
    """
    sampled = [one for one in taken if len(one.ratios) > 1]
    freedom = sum(len(one.ratios) - 1 for one in sampled) + max(0, len(plain_ms) - 2)
    if freedom < least_freedom:
        return math.inf
    away = [abs(2 * ms / (plain_ms[at] + plain_ms[at + 2]) - 1) for at, ms in enumerate(plain_ms[1:-1])]
    for one in sampled:
        mean, num = fmean(one.ratios), len(one.ratios)
        away += [abs(ratio / mean - 1) * math.sqrt(num / (num - 1)) for ratio in one.ratios]
    return math.sqrt(math.pi / 2) * fmean(away)


class _Taken:
    """Samples of one variant.

    Attributes:
        ratios: To what the plain one takes at that moment.
    """

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.ratios: list[float] = []
        self._spent_ms = 0.0

    def add(self, ms: float, plain_ms: float) -> None:
        self.ratios.append(ms / plain_ms)
        self._spent_ms += ms

    def is_enough(self, spread: float) -> bool:
        if len(self.ratios) < _LEAST_SAMPLES:
            return False
        if self._spent_ms >= _MOST_MS:
            return True
        ratio = median(self.ratios)
        known = self.error(spread) * ratio <= max(_ERROR, _ERROR_OF_EXTRA * abs(ratio - 1))
        return known and self._spent_ms >= _SAMPLED_MS

    def error(self, spread: float) -> float:
        """Standard error of the median of normal numbers that spread so, as a share of it."""
        return math.sqrt(math.pi / 2) * spread / math.sqrt(len(self.ratios))


def _runnable(variant: Variant) -> Compiled:
    assert variant.run is not None
    variant.kernels.compile()
    return variant.run


def _copy(value: Any) -> Any:
    """Parameters and sizes as they are; anything else anew: compiled code may write it."""
    return copy_of(value) if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) else value


def _results(
    run: Compiled, inputs: list[Any], device: torch.device, directions: list[torch.Tensor], seed: int = 0
) -> _Results:
    """Everything that one step of the layer gives, by name.

    Args:
        directions: What backward begins with; drawn where there is none yet.
    """
    torch.manual_seed(seed)
    with torch.enable_grad():
        outputs = [t for t in run(*inputs) if isinstance(t, torch.Tensor)]
    differentiable = [t for t in outputs if t.requires_grad]
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    wanted = [t for t in tensors if t.requires_grad]
    directions += [random_like(t) for t in differentiable[len(directions) :]]
    gradients: Sequence[Any] = ()
    if differentiable:
        gradients = torch.autograd.grad(differentiable, wanted, directions, allow_unused=True)
    found: _Results = [(f"output {i}", part_of(t).detach()) for i, t in enumerate(outputs)]
    found += [(f"gradient {i}", t if t is None else part_of(t)) for i, t in enumerate(gradients)]
    found += [(f"input {i}", part_of(t).detach()) for i, t in enumerate(tensors)]
    return [*found, ("the random generator", state_of(device))]
