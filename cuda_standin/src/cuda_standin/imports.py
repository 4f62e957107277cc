"""Functions that are called when a module is imported, without importing it."""

import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_before: dict[str, list[Callable[[ModuleSpec], object]]] = {}
_after: dict[str, list[Callable[[ModuleType], object]]] = {}
_asked: set[tuple[int, str]] = set()  # threads whose search for a module goes on below


class _Finder:
    """Stands first, finds nothing by itself: it lets the others find the module, and adds what was asked for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        search = (threading.get_ident(), name)
        if (name not in _before and name not in _after) or search in _asked:  # another finder of this kind asks back
            return None
        _asked.add(search)
        try:
            others = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))
            found = next((spec for other in others if (spec := other.find_spec(name, path, target)) is not None), None)
        finally:
            _asked.discard(search)
        if found is None or found.loader is None:
            return found
        execute = found.loader.exec_module

        def exec_module(module: ModuleType) -> None:  # not when it is found: many only ask whether a package is there
            for prepare in _before.pop(name, []):
                prepare(found)
            execute(module)
            for function in _after.pop(name, []):
                function(module)

        found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


def before_import(name: str, function: Callable[[ModuleSpec], object]) -> None:
    """Calls ``function`` with the module's spec before its code runs."""
    _before.setdefault(name, []).append(function)
    _stand_first()


def after_import(name: str, function: Callable[[ModuleType], object]) -> None:
    """Calls ``function`` with the module when its code has run; at once where it has already."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        function(module)
        return
    _after.setdefault(name, []).append(function)
    _stand_first()


def _stand_first() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
