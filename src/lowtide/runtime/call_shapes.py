"""What makes two calls of a model calls of one shape, and which shapes a plan for a larger one serves."""

import re
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.tracing.module_calls import call_signature

_SIZES = re.compile(r"\[([\d,]*)\]")  # of one tensor, in a signature


class CallShape(NamedTuple):
    """One call's arguments: what they are, and the sizes of their tensors.

    Attributes:
        pattern: Dtypes, numbers of dimensions, flags and words; not numbers, which may count up.
        sizes: Every dimension of every tensor, in order.
    """

    pattern: str
    sizes: tuple[int, ...]

    def covers(self, other: "CallShape") -> bool:
        """At least as large in every dimension: which storages live when does not depend on their bytes."""
        return self.pattern == other.pattern and all(a >= b for a, b in zip(self.sizes, other.sizes, strict=True))

    def share_of(self, other: "CallShape") -> float:
        """How much smaller than ``other``, in the dimension where they differ most."""
        return min((a / b for a, b in zip(self.sizes, other.sizes, strict=True) if b), default=1.0)


def shape_of_call(model: nn.Module, args: tuple, kwargs: dict) -> CallShape:
    """The shape of a call. Whether a number changes the ops, the op sequence shows."""
    signature = call_signature(model, _without_numbers(args), _without_numbers(kwargs))
    found = [sizes.split(",") if sizes else [] for sizes in _SIZES.findall(signature)]
    pattern = _SIZES.sub(lambda match: f"[{match[1].count(',') + bool(match[1])}]", signature)
    return CallShape(pattern, tuple(int(n) for sizes in found for n in sizes))


def _without_numbers(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, bool)):
        return value
    if isinstance(value, (int, float)):
        return 0.0  # described as a float, whatever it is
    if type(value) in (list, tuple):
        return tuple(_without_numbers(v) for v in value)
    return {k: _without_numbers(v) for k, v in value.items()} if type(value) is dict else value
