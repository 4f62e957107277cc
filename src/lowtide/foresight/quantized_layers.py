"""4-bit layers as bitsandbytes runs them: the weight is expanded for each product, in forward and again in backward.

What they keep depends on the version (``bitsandbytes/autograd/_functions.py``, ``bitsandbytes/nn/modules.py``): before
0.43.2 each layer saved its input too, though its weight is not trained
(https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1270), and before 0.43.0 weights were expanded in float16
and then cast, so that there were two copies. The kernel of 0.50 that does not expand takes few tokens, as in
generation; training has more.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

_INPUTS_FREE_SINCE, _ONE_COPY_SINCE = (0, 43, 2), (0, 43, 0)


class Expansion(NamedTuple):
    """What a layer keeps, and how its weight is expanded."""

    keeps_input: bool
    through_float16: bool


def expansion_of(version: str | None) -> Expansion:
    """As ``version`` of bitsandbytes has it, such as ``"0.41.1"``; None: as those of today."""
    numbers = tuple(map(int, re.findall(r"\d+", version or "")[:3])) or _INPUTS_FREE_SINCE
    return Expansion(numbers < _INPUTS_FREE_SINCE, numbers < _ONE_COPY_SINCE)


def installed_version() -> str | None:
    """Of bitsandbytes here; None without it."""
    try:
        return importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:
        return None


class FourBitProduct(torch.autograd.Function):
    """``functional.linear`` with a frozen weight that is stored in ``packed`` and expanded to ``shape``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, shape: tuple[int, int],
        expansion: Expansion,
    ) -> torch.Tensor:  # fmt: skip
        ctx.packed, ctx.shape, ctx.expansion = packed, shape, expansion
        ctx.x = x if expansion.keeps_input else None
        return functional.linear(x, _expanded(packed, shape, x.dtype, expansion), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        weight = _expanded(ctx.packed, ctx.shape, gradient.dtype, ctx.expansion)
        return gradient @ weight, None, None, None, None


def _expanded(packed: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, expansion: Expansion) -> torch.Tensor:
    """A tensor as large as the weight; its values are nobody's."""
    first = torch.float16 if expansion.through_float16 else dtype
    return packed.new_empty(shape, dtype=first).to(dtype)


class FourBitLinear(nn.Module):
    """A linear layer in whose place it is; its weight keeps its shape, and counts as 4 bits where it is stored."""

    def __init__(self, layer: nn.Linear, expansion: Expansion) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias, self._expansion = layer.weight, layer.bias, expansion

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (self.out_features, self.in_features)
        made: torch.Tensor = FourBitProduct.apply(x, self.weight, self.bias, shape, self._expansion)
        return made


def quantize(model: nn.Module, expansion: Expansion) -> None:
    """Every frozen linear layer becomes one of 4 bits, but not the head, as transformers and PEFT have it."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for parent, name, layer in list(_linear_layers(model)):
        if layer is not head and not layer.weight.requires_grad:
            setattr(parent, name, FourBitLinear(layer, expansion))


def quantized_names(model: nn.Module) -> set[str]:
    """Names of the weights that are stored in 4 bits."""
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, FourBitLinear)}


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                yield parent, name, child
