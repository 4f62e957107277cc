"""Proofs that are left out, since an op of the same kind has been made again at the same place of the model before.

A *place* is a module call's path and the op's position in that call. Whether another run gives the same bits depends on
the kernel, and on code there that writes past every version counter. Both are the same in the next step. So each place
is proven in the first step that lets go of something there, of each kind: operator, layouts by size class, other
arguments, global flags. From then on its values go without a proof, and one in seventeen is sealed: what differs then
is an error before any number is computed from it.

A value is known if its own op is, and all that is absent of what it is made from.
"""

from collections.abc import Iterable
from itertools import count
from typing import Any

import torch

from lowtide.tape.online.online_values import Recipe, StoredValue
from lowtide.tape.values import Kept, ViewSpec

SEAL_EVERY = 17  # values; a prime, so that a step of any length seals other values each time
_MOST_KNOWN = 10_000
_EXACT = 16  # numbers up to here are told apart: dimensions and flags, mostly
_released = count(1)


class KnownProofs:
    """Outlives a step."""

    def __init__(self) -> None:
        self._known: set[Any] = set()

    def learn(self, chain: Iterable[StoredValue]) -> None:
        """All of these were made again, and what came of it had the same bits."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.update(kind for value in chain if (kind := kind_of(value.recipe)) is not None)

    def knows(self, value: StoredValue) -> bool:
        """Whether another run of ``value``, and of all that is absent before it, need not be proven."""
        seen, todo, all_absent = {id(value): value}, [value], True
        while todo:
            current = todo.pop()
            if current.known is None:
                kind = kind_of(current.recipe)
                current.known = kind is not None and kind in self._known
            if not current.known:
                return False
            for read in current.inputs:
                if read.is_present:  # and goes only when it is known itself
                    all_absent = False
                elif read.recipe is not None and not read.known_with_inputs and id(read) not in seen:
                    seen[id(read)] = read
                    todo.append(read)
        if all_absent:
            for found in seen.values():
                found.known_with_inputs = True
        return True


def is_sealed_next() -> bool:
    """Whether the value that goes now is one of those that are compared when they are made again."""
    return next(_released) % SEAL_EVERY == 0


def kind_of(recipe: Recipe | None) -> Any:
    """What decides the bits of another run, and where it is; None: each run is to be proven."""
    if recipe is None or recipe.place is None:
        return None
    found: list[Any] = [recipe.place, recipe.flags, recipe.autocast]
    for func, args, kwargs in recipe.calls():
        found += func, *map(_layout, args), *kwargs, *map(_layout, kwargs.values())
    kind = tuple(found)
    try:
        hash(kind)
    except TypeError:
        return None
    return kind


def _layout(name: Any) -> Any:
    kind = type(name)
    if isinstance(name, ViewSpec):
        return *map(_class_of, name.size), *map(_class_of, name.stride), name.offset % 16, name.dtype
    if kind is Kept:
        tensor: torch.Tensor = name.tensor
        offset = tensor.storage_offset() % 16
        return *map(_class_of, tensor.shape), *map(_class_of, tensor.stride()), offset, tensor.dtype
    if kind is list:
        return tuple(map(_layout, name))
    if kind is int:
        return kind, _class_of(name)
    return kind, repr(name) if kind is float else name


def _class_of(number: int) -> Any:
    """Sizes between two powers of two run the same kernels, where they are as well aligned."""
    return number if -_EXACT <= number <= _EXACT else (number.bit_length(), number % _EXACT == 0, number < 0)
