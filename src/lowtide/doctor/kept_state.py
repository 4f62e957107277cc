"""What modules keep of a step in Python attributes and generators of their own: put back afterwards."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.step.other_generators import is_generator, set_state, state_of

_CONSTANTS = (bool, int, float, str, type(None))


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Counters, flags and lists that modules keep are afterwards as before."""
    before = []
    for module in model.modules():
        values = {k: v for k, v in vars(module).items() if type(v) in _CONSTANTS or isinstance(v, torch.Tensor)}
        lists = [(v, list(v)) for v in vars(module).values() if type(v) is list]
        before.append((vars(module), values, lists, set(vars(module))))
    try:
        yield
    finally:
        for attributes, values, lists, names in before:
            attributes.update(values)
            for name in set(attributes) - names:
                del attributes[name]
            for kept, items in lists:
                kept[:] = items


@contextmanager
def with_attribute(name: str, values: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Inside, each object has its value of the attribute ``name``; afterwards the one before.

    Args:
        values: Objects with their values.
    """
    before = [(item, getattr(item, name)) for item, _ in values]
    for item, value in values:
        setattr(item, name, value)
    try:
        yield
    finally:
        for item, value in before:
            setattr(item, name, value)


@contextmanager
def generators_kept(model: nn.Module) -> Iterator[None]:
    """Generators that modules own are afterwards as before."""
    own = [value for module in model.modules() for value in vars(module).values() if is_generator(value)]
    states = [state_of(generator) for generator in own]
    try:
        yield
    finally:
        for generator, state in zip(own, states, strict=True):
            set_state(generator, state)
