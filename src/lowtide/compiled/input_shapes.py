"""What distinguishes steps of a compiled model that have plans of their own: inputs, and the state of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.device.names import autocast_types
from lowtide.step.batches import batch_tensors
from lowtide.step.operators import gradient_of


class InputShapes(NamedTuple):
    """What distinguishes steps that have plans of their own.

    Attributes:
        pattern: All of it but sizes.
        sizes: Of all dimensions of the inputs.
    """

    pattern: str
    sizes: tuple[int, ...]

    def covers(self, other: InputShapes) -> bool:
        """Whether the other's inputs are the same but smaller. Compilers treat sizes of 0 and 1 by themselves."""
        pairs = list(zip(self.sizes, other.sizes, strict=False))
        return self.pattern == other.pattern and all(a == b or (a > b and b > 1) for a, b in pairs)


def shapes_of(args: tuple, kwargs: dict[str, Any], model: nn.Module) -> InputShapes:
    """What distinguishes steps that have plans of their own: tensors, names and flags, no other values."""
    enabled = [kind for kind in autocast_types() if torch.is_autocast_enabled(kind)]
    autocast = " ".join(f"{kind} {torch.get_autocast_dtype(kind)}" for kind in enabled)
    # Whether there is a gradient already: backward makes it, or adds to it.
    trained = "".join("012"[p.requires_grad * (1 + (gradient_of(p) is not None))] for p in model.parameters())
    sizes: list[int] = []
    specs = [_spec_of(args, sizes), _spec_of(kwargs, sizes)]
    pattern = [*specs, f"training={model.training}", f"autocast={autocast}", f"trained={trained}"]
    return InputShapes(" ".join(pattern), tuple(sizes))


def _spec_of(value: Any, sizes: list[int]) -> str:
    """A value of the batch without its sizes, which ``sizes`` gets."""
    if isinstance(value, torch.Tensor):
        sizes += value.shape
        return f"{value.dim()} {value.dtype}"
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_spec_of(v, sizes) for v in value)}]"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_spec_of(value[name], sizes)}" for name in sorted(value, key=str))
    return type(value).__name__ + "".join(_spec_of(v, sizes) for v in batch_tensors(value))
