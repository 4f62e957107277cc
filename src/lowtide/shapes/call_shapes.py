"""What makes two calls of a model calls of one shape, and which shapes a plan for a larger one serves."""

import re
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.step.module_calls import call_signature, masks_nothing

_SIZES = re.compile(r"\[([\d,]*)\]")  # of one tensor, in a signature
_LATER = "gradients there; "  # before the pattern of a step that adds to gradients: a later micro-batch
_TOLD_BY_VALUE = frozenset({bool, str, type(None)})


class CallShape(NamedTuple):
    """One call's arguments: what they are, and the sizes of their tensors.

    Attributes:
        pattern: Dtypes, numbers of dimensions, flags and words, whether an attention mask masks anything, whether the
            model has gradients before the step; not numbers, which may count up.
        sizes: Every dimension of every tensor, in order.
    """

    pattern: str
    sizes: tuple[int, ...]

    def covers(self, other: "CallShape") -> bool:
        """At least as large in every dimension: which storages live when does not depend on their bytes.

        A step that adds to gradients takes no less than the one that makes them.
        """
        alike = self.pattern == other.pattern or self == other.with_gradients()._replace(sizes=self.sizes)
        return alike and all(a >= b for a, b in zip(self.sizes, other.sizes, strict=True))

    @property
    def has_gradients(self) -> bool:
        """The model has gradients before the step, and the step adds to them."""
        return self.pattern.startswith(_LATER)

    def with_gradients(self) -> "CallShape":
        """The same call in a later micro-batch."""
        return self if self.has_gradients else self._replace(pattern=_LATER + self.pattern)

    def without_gradients(self) -> "CallShape":
        """The same call in a first micro-batch."""
        return self._replace(pattern=self.pattern.removeprefix(_LATER))

    def of_training(self, trained: str) -> "CallShape":
        """The same call in steps that train other parameters: autograd stores other tensors, and makes other gradients.

        Args:
            trained: What marks these steps.
        """
        return self._replace(pattern=trained + self.pattern)

    def share_of(self, other: "CallShape") -> float:
        """How much smaller than ``other``, in the dimension where they differ most."""
        return min((a / b for a, b in zip(self.sizes, other.sizes, strict=True) if b), default=1.0)


_shapes: dict[tuple, CallShape] = {}  # of the calls so far, by what their signatures are made of
_MOST_SHAPES = 1024


def shape_of_call(model: nn.Module, args: tuple, kwargs: dict) -> CallShape:
    """The shape of a call. Whether a number changes the ops, the op sequence shows."""
    if torch._C._is_any_autocast_enabled():
        return shape_of_signature(call_signature(model, args, kwargs))
    key: list[Any] = [model.training, masks_nothing(kwargs), *kwargs]
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind is torch.Tensor:
            key += (value.dtype, value.shape, value.requires_grad)
        elif kind in _TOLD_BY_VALUE:
            key += (kind, value)
        elif kind is int or kind is float:
            key.append(kind)
        else:  # what it holds may change
            return shape_of_signature(call_signature(model, args, kwargs))
    shape = _shapes.get(tuple(key))
    if shape is None:
        if len(_shapes) >= _MOST_SHAPES:
            _shapes.clear()
        shape = _shapes[tuple(key)] = shape_of_signature(call_signature(model, args, kwargs))
    return shape


def shape_of_signature(signature: str) -> CallShape:
    """The shape of a call that a graph was recorded from (``StepGraph.calls``)."""
    found = [sizes.split(",") if sizes else [] for sizes in _SIZES.findall(signature)]
    pattern = _SIZES.sub(lambda match: f"[{match[1].count(',') + bool(match[1])}]", signature)
    return CallShape(pattern, tuple(int(n) for sizes in found for n in sizes))
