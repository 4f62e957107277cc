"""Inputs like those that a layer was called with, to try its variants on. DTensors are given this rank's part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.compiled.generated_code import BufferSpec
from lowtide.step.operators import is_wrapper_type
from lowtide.step.subclasses import is_of_ranks


@dataclass(frozen=True)
class Sample:
    """How to make an input like the one seen: random where it has a gradient, a copy of its bits elsewhere.

    In bfloat16 a variant may have the bits of the plain one under random masks, and others where a mask is minus
    infinity.

    Attributes:
        layout: Of what is no plain tensor.
    """

    spec: BufferSpec
    requires_grad: bool
    device: torch.device
    copy: torch.Tensor | None  # on the host: the device's memory is the step's
    layout: Callable[[torch.Tensor], torch.Tensor] | None = None

    @staticmethod
    def of(tensor: torch.Tensor, *, values: bool = True) -> Sample:
        """Args: ``values``: False: random in any case."""
        part = part_of(tensor)
        drawn = not values or (part.dtype.is_floating_point and tensor.requires_grad)
        kept = None if drawn else part.detach().to("cpu", copy=True)
        return Sample(BufferSpec.of(part), tensor.requires_grad, part.device, kept, layout_of(tensor))

    def tensor(self) -> torch.Tensor:
        spec = self.spec
        if self.copy is not None:
            made = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=self.device)
            return with_layout(made.copy_(self.copy), self.layout)
        # What has no gradient may be a variance, and is positive.
        draw = torch.randn if self.requires_grad else torch.rand
        memory = draw(spec.bytes // spec.dtype.itemsize, device=self.device).to(spec.dtype)
        return with_layout(memory.as_strided(spec.size, spec.stride), self.layout).requires_grad_(self.requires_grad)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Anew, with its values and strides."""
    part = part_of(tensor)
    made = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device)
    with torch.no_grad():
        made.copy_(part)
    return with_layout(made, layout_of(tensor)).requires_grad_(tensor.requires_grad)


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
