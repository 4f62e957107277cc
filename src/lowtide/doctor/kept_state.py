"""What modules keep of a step in Python attributes and generators of their own: put back afterwards."""

import copy
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn

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


def generators_of(model: nn.Module) -> Iterator[Any]:
    kinds = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
    for module in model.modules():
        yield from (v for v in vars(module).values() if isinstance(v, kinds))


@contextmanager
def generators_kept(generators: list[Any]) -> Iterator[None]:
    """Generators that modules own are afterwards as before."""
    restore: list[Callable[[], Any]] = []
    for g in generators:
        if isinstance(g, torch.Generator):
            restore.append(functools.partial(g.set_state, g.get_state()))
        elif isinstance(g, random.Random):
            restore.append(functools.partial(g.setstate, g.getstate()))
        elif isinstance(g, numpy.random.Generator):
            state = copy.deepcopy(g.bit_generator.state)
            restore.append(functools.partial(setattr, g.bit_generator, "state", state))
        else:
            restore.append(functools.partial(g.set_state, g.get_state()))
    try:
        yield
    finally:
        for put_back in restore:
            put_back()
