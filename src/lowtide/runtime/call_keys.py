"""What makes two calls of a model calls of one shape: tensors, flags and words; not numbers, which may count up."""

from typing import Any

import torch
from torch import nn

from lowtide.tracing.module_calls import call_signature


def shape_key(model: nn.Module, args: tuple, kwargs: dict) -> str:
    """As ``call_signature``, without the values of numbers: whether one changes the ops, the op sequence shows."""
    return call_signature(model, _without_numbers(args), _without_numbers(kwargs))


def _without_numbers(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, bool)):
        return value
    if isinstance(value, (int, float)):
        return 0.0  # described as a float, whatever it is
    if type(value) in (list, tuple):
        return tuple(_without_numbers(v) for v in value)
    return {k: _without_numbers(v) for k, v in value.items()} if type(value) is dict else value
