"""Inputs like those that a layer was called with, to try its variants on. DTensors are given this rank's part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.compiled.generated_code import BufferSpec
from lowtide.measurement.op_inputs import span
from lowtide.step.operators import is_wrapper_type
from lowtide.step.subclasses import is_of_ranks

_NOISE = 0.125  # of a parameter's values; of 1 where they are zero
_FEW = 1 << 16  # elements: larger parameters are tried as they are, which takes no memory
_MASKED = -1e4  # and less, or an infinity: what keeps a score out of a softmax
_SHARE_MASKED = 0.3


@dataclass(frozen=True)
class Sample:
    """How to make an input like the one seen: random where it has a gradient, a copy of its bits elsewhere.

    Attributes:
        layout: Of what is no plain tensor.
    """

    spec: BufferSpec
    requires_grad: bool
    device: torch.device
    copy: torch.Tensor | None  # of its memory, on the host: the device's is the step's
    layout: Callable[[torch.Tensor], torch.Tensor] | None = None

    @staticmethod
    def of(tensor: torch.Tensor, *, values: bool = True) -> Sample:
        """Args: ``values``: False: random in any case."""
        part = part_of(tensor)
        drawn = not values or (part.dtype.is_floating_point and tensor.requires_grad)
        kept = None if drawn else _memory_of(part).to("cpu", copy=True)
        return Sample(BufferSpec.of(part), tensor.requires_grad, part.device, kept, layout_of(tensor))

    def tensor(self, *, other: bool = False) -> torch.Tensor:
        """Args: ``other``: with values that are as likely in other calls, in the place of a copy's."""
        spec = self.spec
        if self.copy is not None:
            memory = (_other_values(self.copy) if other else self.copy).to(self.device, copy=True)
        else:  # what has no gradient may be a variance, and is positive
            draw = torch.randn if self.requires_grad else torch.rand
            memory = draw(spec.bytes // spec.dtype.itemsize, device=self.device).to(spec.dtype)
        return with_layout(memory.as_strided(spec.size, spec.stride), self.layout).requires_grad_(self.requires_grad)

    @property
    def is_constant(self) -> bool:
        """All its values are one, as those of a mask are where nothing is masked."""
        return self.copy is not None and _is_constant(self.copy)


def _other_values(seen: torch.Tensor) -> torch.Tensor:
    """As they may be in another call: masks keep out other places, and other numbers are positive. Integers stay, as
    they may be places in a table; ones and zeros are a mask, or places that every such table has."""
    integer = not (seen.dtype.is_floating_point or seen.dtype.is_complex)
    if seen.dtype == torch.bool or (integer and set(seen.unique().tolist()) in ({1}, {0, 1})):
        return (torch.rand(seen.shape) < 0.5).to(seen.dtype)
    if not _is_real(seen):
        return seen
    lowest = seen.min().item()
    if lowest == 0 and _is_constant(seen) and torch.rand(()) < 0.5:  # perhaps a mask that keeps out nothing yet
        lowest = torch.finfo(seen.dtype).min
    if lowest <= _MASKED:
        return torch.zeros_like(seen).masked_fill_(torch.rand(seen.shape) < _SHARE_MASKED, lowest)
    return torch.rand(seen.shape).to(seen.dtype)


def _is_real(tensor: torch.Tensor) -> bool:
    """Its numbers can be compared and added to; those of eight bits cannot."""
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and tensor.numel() > 0


def _is_constant(tensor: torch.Tensor) -> bool:
    known = _is_real(tensor) or tensor.dtype == torch.bool
    return known and tensor.numel() > 1 and torch.equal(*tensor.aminmax())


def as_trained(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter as it may be after some steps; itself where it is large and has different values.

    Training begins with biases of zero and gains of one. What is added to zero or multiplied by one is not rounded, so
    variants that round elsewhere agree until the first update.
    """
    part = part_of(parameter)
    if not _is_real(part) or (part.numel() > _FEW and not _is_constant(part.detach())):
        return parameter
    memory = _memory_of(part)
    noise = torch.rand(memory.shape, device=part.device, dtype=torch.float32).mul_(2 * _NOISE).sub_(_NOISE)
    made = (memory + noise * torch.where(memory == 0, 1, memory)).to(part.dtype).as_strided(part.shape, part.stride())
    return with_layout(made, layout_of(parameter)).requires_grad_(parameter.requires_grad)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Anew, with its values and strides."""
    part = part_of(tensor)
    made = _memory_of(part).clone().as_strided(part.shape, part.stride())
    return with_layout(made, layout_of(tensor)).requires_grad_(tensor.requires_grad)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """What it spans, in a row; an expanded tensor has several elements in one place, and cannot be written."""
    return tensor.detach().as_strided((span(tuple(tensor.shape), tensor.stride()),), (1,))


def random_like(tensor: torch.Tensor) -> torch.Tensor:
    """Normal numbers, drawn in single precision."""
    part = part_of(tensor)
    return with_layout(torch.randn(part.shape, device=part.device).to(part.dtype), layout_of(tensor))


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor in a DTensor, or in a value that ranks are still sending; any other tensor itself."""
    if not is_of_ranks(tensor):
        return tensor
    if hasattr(tensor, "_local_tensor"):
        return part_of(tensor._local_tensor)
    waited: torch.Tensor = tensor.trigger_wait()
    return waited


def layout_of(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Makes a tensor of the same kind of a plain one; None where ``tensor`` is plain."""
    if not is_of_ranks(tensor):
        return None
    if not hasattr(tensor, "_local_tensor"):
        return type(tensor)
    kind, spec, inside = type(tensor), tensor._spec, layout_of(tensor._local_tensor)
    return lambda part: kind(with_layout(part, inside), spec, requires_grad=False)


def with_layout(part: torch.Tensor, layout: Callable[[torch.Tensor], torch.Tensor] | None) -> torch.Tensor:
    return part if layout is None else layout(part)


def num_parts(value: Any) -> int:
    """How many inputs of a graph below autograd an input is: a DTensor is its part and its mesh."""
    if not isinstance(value, torch.Tensor) or not is_wrapper_type(type(value)):
        return 1
    return sum(num_parts(getattr(value, name)) for name in value.__tensor_flatten__()[0])
