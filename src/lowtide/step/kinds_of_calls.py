"""Kinds of calls: the proof of one call holds for all calls of its kind. What was found is kept here."""

import enum
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

# By value, a few of each: they say which way a kernel goes, and never count up.
_FEW = (bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, type)
# By value, any number of them: they may be other ones in each step.
_MANY = (int, float, complex, str, bytes)
_CONTAINERS = (tuple, list)
MOST_VALUES = 8  # of the arguments at one place that are remembered; a step counter would fill memory
_MANY_PLACES = 32  # that calls with equal tensors come from, where places are not told apart: layers
_MOST_KINDS = 10_000  # a kind holds its Function
ANEW = "is given other numbers all the time: each call is proven anew, which takes one more run"


class Kind(NamedTuple):
    """Which kernels a call runs.

    Attributes:
        place: What the call is of, flags, how its tensors lie in memory, and types.
        values: Plain arguments. A kernel may give the same bits again with one number and not with another.
    """

    place: tuple
    values: tuple


class KnownKinds:
    """Why what calls of each kind make is kept, "" where they may run again.

    Of each place the latest values are remembered. A call with others is proven as the first one was.

    Args:
        many_places: Calls come from any place.
    """

    def __init__(self, *, many_places: bool = False) -> None:
        self._most_values = MOST_VALUES * (_MANY_PLACES if many_places else 1)
        self._verdicts: dict[tuple, dict[tuple, str]] = {}
        self._num_kinds = 0
        self._never_the_same: set[tuple] = set()  # places of which values have been forgotten

    def __contains__(self, kind: Kind) -> bool:
        return self.verdict(kind) is not None

    def verdict(self, kind: Kind) -> str | None:
        """None if there has been no such call, or too many others since."""
        found = self._verdicts.get(kind.place)
        verdict = None if found is None else found.get(kind.values)
        if found is not None and verdict is not None and len(found) > 1:
            found[kind.values] = found.pop(kind.values)  # the latest
        return verdict

    def learn(self, kind: Kind, verdict: str) -> None:
        if self._num_kinds >= _MOST_KINDS:
            self._verdicts.clear()
            self._never_the_same.clear()
            self._num_kinds = 0
        found = self._verdicts.setdefault(kind.place, {})
        self._num_kinds += kind.values not in found
        found[kind.values] = verdict
        if len(found) > self._most_values:
            del found[next(iter(found))]
            self._num_kinds -= 1
            self._never_the_same.add(kind.place)

    def is_never_the_same(self, kind: Kind) -> bool:
        """So many values have come at the place of ``kind`` that some are forgotten."""
        return kind.place in self._never_the_same

    def reasons(self) -> Iterator[str]:
        """Those that are remembered, oldest first."""
        for verdicts in self._verdicts.values():
            yield from filter(None, verdicts.values())


def layout_of(argument: Any) -> Any:
    """What of an argument belongs to the place: equal for tensors that lie alike and for numbers of one type."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.storage_offset() % 64, argument.dtype, argument.device
    if isinstance(argument, _CONTAINERS):
        return type(argument), *map(layout_of, argument)
    if type(argument) is dict:
        return dict, *((name, layout_of(value)) for name, value in argument.items())
    return (type(argument), argument) if isinstance(argument, _FEW) else type(argument)


def values_of(arguments: Any) -> tuple:
    """The plain values in ``arguments`` that belong to a call and not to its place."""
    return tuple(_plain_values(arguments))


def _plain_values(argument: Any) -> Iterator[Any]:
    if isinstance(argument, _CONTAINERS):
        for item in argument:
            yield from _plain_values(item)
    elif type(argument) is dict:
        for item in argument.values():
            yield from _plain_values(item)
    elif isinstance(argument, types.FunctionType):
        # The code, not the object: a lambda is another object in each step.
        yield argument.__code__, values_of((argument.__defaults__, argument.__kwdefaults__))
    elif isinstance(argument, types.BuiltinFunctionType):
        yield argument
    elif isinstance(argument, _MANY) and not isinstance(argument, _FEW):
        # As text, which tells 0.0 from -0.0, and by which a NaN is itself.
        base = next(kind for kind in _MANY if isinstance(argument, kind))
        yield base.__repr__(argument)


def is_immutable(value: Any) -> bool:
    """Whether it is the same when backward comes."""
    if isinstance(value, tuple):
        return all(map(is_immutable, value))
    if isinstance(value, types.FunctionType):
        held = (value.__defaults__ or (), tuple((value.__kwdefaults__ or {}).values()))
        return not value.__closure__ and not vars(value) and is_immutable(held)  # anybody may rebind a cell
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType)
    return isinstance(value, (*_FEW, *_MANY))
