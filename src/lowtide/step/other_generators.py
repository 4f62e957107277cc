"""Random generators that no recipe holds: Python's, NumPy's, and those that a call's own code refers to.

    code -> the values of its names: in globals, closures and defaults, and on modules, objects and classes among them
    objects -> what they hold, two levels deep

If a call's code names such a generator, the call is never run again. If an object merely holds one, the call may not
draw from it: a second run shows whether it does, and the generator's state is restored.
"""

import functools
import inspect
import random
import sys
import types
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import Function

from lowtide.step.bits import same_bits

_LEVELS = 2  # so deep into what an object holds
_MOST_ITEMS = 100  # of a container
_MOST_LOOKS = 100_000  # at values
_MOST_TOLD = 3
# What their functions draw from is a default generator, or given to them.
_NOT_SEARCHED = frozenset({"torch", "numpy", "triton", "lowtide", *sys.stdlib_module_names})
_WRAPPERS = (functools.partial, staticmethod, classmethod, property)
_LISTS_OF_MODULES = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_HOLD_NOTHING = (torch.Tensor, torch.dtype, torch.device, str, bytes, int, float, complex, type(None))


class HostGenerators:
    """The states of Python's and NumPy's global generators."""

    def __init__(self) -> None:
        self._generators = {"Python's random": _python()}
        if "numpy.random" in sys.modules:
            self._generators["NumPy's generator"] = sys.modules["numpy.random"].mtrand._rand
        self._states = {name: state_of(generator) for name, generator in self._generators.items()}

    def moved(self) -> set[str]:
        """Those that have another state now."""
        return {name for name, g in self._generators.items() if not _is_same(state_of(g), self._states[name])}

    def restore_if_moved(self) -> bool:
        """Put them back; whether they had moved."""
        moved = self.moved()
        for name in moved:
            set_state(self._generators[name], self._states[name])
        return bool(moved)


class OwnGenerators:
    """Generators in what the code of a call refers to.

    Attributes:
        named: By the code, in its words.
        held: By what it names; whether it draws from them is not known.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        """``roots``: what the search begins with, by name."""
        search = _Search(roots)
        self.named = {f.name: f.value for f in search.found.values() if f.is_named}
        self.held = {f.name: f.value for f in search.found.values() if not f.is_named}
        self._states: dict[str, Any] = {}

    def note_states(self) -> None:
        """Of those held: another run follows."""
        self._states = {name: state_of(generator) for name, generator in self.held.items()}

    def restore_moved(self) -> list[str]:
        """Put back those held that have moved since; their names."""
        moved = [name for name, state in self._states.items() if not _is_same(state_of(self.held[name]), state)]
        for name in moved:
            set_state(self.held[name], self._states[name])
        return moved


def draws_from(names: Iterable[str]) -> str:
    """The reason why a call that draws from its own generators is kept; "" if there are none."""
    shown = ", ".join(sorted(names)[:_MOST_TOLD])
    return f"draws from a generator of its own ({shown})" if shown else ""


# -- the search --------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """A value that the search has come to.

    Attributes:
        names: Those in the code that led to it.
        is_named: They name it, too.
        level: So many objects hold it.
        owner: The object or class that it is a method of.
    """

    name: str
    value: Any
    names: tuple[str, ...] = ()
    is_named: bool = True
    level: int = 0
    owner: Any = None


class _Search:
    """Looks through what code refers to.

    Attributes:
        found: Generators, by id.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self.found: dict[int, _Found] = {}
        self._todo = deque(_Found(*root) for root in roots)  # the shortest name is found first
        self._seen: dict[tuple[int, tuple[str, ...]], Any] = {}  # holds the values: another would get its id
        self._opened: set[int] = set()  # ids of objects of which all has been looked at
        while self._todo and len(self._seen) < _MOST_LOOKS:
            at = self._todo.popleft()
            with suppress(Exception):  # of an object that does not like to be looked at
                if not is_generator(at.value):
                    self._search(at)
                elif id(at.value) not in self.found or (at.is_named and not self.found[id(at.value)].is_named):
                    self.found[id(at.value)] = at
        for default in _default_generators():
            self.found.pop(id(default), None)

    def _search(self, at: _Found) -> None:
        value = at.value
        key = id(value), at.names
        if key in self._seen:
            return
        self._seen[key] = value
        if isinstance(value, _WRAPPERS):
            self._todo += [at._replace(value=inside) for inside in _wrapped(value)]
        elif isinstance(value, types.ModuleType):
            if _is_searched(value.__name__):
                self._go_on(at, vars(value), only_named=True)
        elif inspect.isfunction(value):
            self._search_function(at)
        elif inspect.ismethod(value) or isinstance(value, types.BuiltinFunctionType):
            self._search_owner(at)
        elif isinstance(value, dict | list | tuple | set | frozenset):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for (key_, item), _ in zip(items, range(_MOST_ITEMS)):
                self._todo.append(at._replace(name=f"{at.name}[{key_!r}]", value=item))
        elif isinstance(value, type):
            self._search_class(at)
        else:
            self._search_object(at)

    def _go_on(self, at: _Found, held: dict[str, Any], *, only_named: bool = False, **how: Any) -> None:
        """To the values in ``held`` that the code names, or to all."""
        for name, value in held.items():
            is_named = name in at.names
            if (is_named or not only_named) and not isinstance(value, _HOLD_NOTHING):
                self._todo.append(at._replace(name=f"{at.name}.{name}", value=value, is_named=is_named, **how))

    def _search_function(self, at: _Found) -> None:
        function = inspect.unwrap(at.value)
        if not _is_searched(function.__module__):
            return
        names = _names_in(function.__code__)
        defaults = (function.__defaults__, function.__kwdefaults__)
        todo: list[tuple[str, Any]] = [(f"defaults of {at.name}", held) for held in defaults]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            with suppress(ValueError):  # it is empty yet
                todo.append((name, cell.cell_contents))
        todo += [(name, function.__globals__[name]) for name in names if name in function.__globals__]
        self._todo += [_Found(name, value, names, level=at.level) for name, value in todo]
        if at.owner is not None:
            self._todo.append(_Found(at.name.rpartition(".")[0], at.owner, names, level=at.level))

    def _search_owner(self, at: _Found) -> None:
        """Of a bound method."""
        owner = at.value.__self__
        name = getattr(at.value, "__name__", "")
        if owner is not None and not isinstance(owner, types.ModuleType):
            named = at.name.removesuffix(f".{name}")
            self._todo.append(at._replace(name=named, value=owner, names=_with(at.names, name)))

    def _search_class(self, at: _Found) -> None:
        """Of an autograd Function all that it has, of other classes what code names."""
        whole = issubclass(at.value, Function)
        for base in reversed(at.value.__mro__):
            if _is_searched(base.__module__):
                held = {n: v for n, v in vars(base).items() if not n.startswith("__")}
                names = tuple(held) if whole else at.names
                self._go_on(at._replace(names=names), held, only_named=True, owner=None if whole else at.value)

    def _search_object(self, at: _Found) -> None:
        """What it holds, and those of its methods that code names."""
        value = at.value
        if isinstance(value, nn.Module):
            at = at._replace(names=_with(at.names, "forward"), level=0)
        held = dict(getattr(value, "__dict__", {}))
        for base in type(value).__mro__:
            slots = vars(base).get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                with suppress(AttributeError):
                    held[slot] = getattr(value, slot)
        children = held.pop("_modules", {}) if isinstance(value, nn.Module) else {}
        if isinstance(value, _LISTS_OF_MODULES):  # code names none of them
            self._todo += [at._replace(name=f"{at.name}.{name}", value=child) for name, child in children.items()]
        if at.level < _LEVELS:
            is_new = id(value) not in self._opened
            self._opened.add(id(value))
            self._go_on(at, {**held, **children}, only_named=not is_new, level=at.level + 1)
        for base in type(value).__mro__:
            if _is_searched(base.__module__):
                named = {n: m for n, m in vars(base).items() if n in at.names or n == "__call__"}
                self._go_on(at, named, level=at.level, owner=value)


def _wrapped(value: Any) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    return [value.fget if isinstance(value, property) else value.__func__]


def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Also those of lambdas inside."""
    names, codes = dict.fromkeys(code.co_names), [code]
    while codes:
        names |= dict.fromkeys((code := codes.pop()).co_names)
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return tuple(names)


def _with(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return names if name in names else (*names, name)


def _is_searched(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in _NOT_SEARCHED


# -- generators --------------------------------------------------------------------------------------------------------


def is_generator(value: Any) -> bool:
    numpy_random = sys.modules.get("numpy.random")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy_random is not None:
        kinds += (numpy_random.Generator, numpy_random.RandomState, numpy_random.BitGenerator)
    return isinstance(value, kinds)


def _default_generators() -> list[Any]:
    """Those that a proof looks at anyway."""
    numpy_random = sys.modules.get("numpy.random")
    of_numpy = [] if numpy_random is None else [numpy_random.mtrand._rand, numpy_random.mtrand._rand._bit_generator]
    return [_python(), torch.default_generator, *of_numpy]


def _python() -> Any:
    return random.random.__self__  # type: ignore[attr-defined]


def state_of(generator: Any) -> Any:
    """A copy; None where it has none (what the system makes of noise)."""
    try:
        if isinstance(generator, random.Random):
            return generator.getstate()
        if hasattr(generator, "get_state"):
            return generator.get_state()
        return getattr(generator, "bit_generator", generator).state
    except NotImplementedError:
        return None


def set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return same_bits(a, b)
    if isinstance(a, dict):
        return all(_is_same(value, b[name]) for name, value in a.items())
    if isinstance(a, tuple):
        return all(map(_is_same, a, b))
    return bool((a == b).all()) if hasattr(a, "shape") else bool(a == b)
