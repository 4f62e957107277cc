"""Functions that are called when a module has been imported, without importing it.

The stand-in for CUDA has the like (``cuda_standin.imports``), and neither package needs the other.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_after: dict[str, Callable[[ModuleType], object]] = {}
_asked: set[tuple[int, str]] = set()  # threads whose search for a module goes on below


class _Finder(MetaPathFinder):
    """Stands first and finds nothing by itself: it lets the others find the module, and adds what was asked for."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        search = (threading.get_ident(), name)
        if name not in _after or search in _asked:  # another finder of this kind asks all others, this one too
            return None
        _asked.add(search)
        try:
            others = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))
            spec = next((found for other in others if (found := other.find_spec(name, path, target)) is not None), None)
        finally:
            _asked.discard(search)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:  # not when it is found: many only ask whether it is there
            execute(module)
            if (function := _after.pop(name, None)) is not None:
                function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_import(name: str, function: Callable[[ModuleType], object]) -> None:
    """Call ``function`` with the module when its code has run; at once where it has already."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        function(module)
        return
    _after[name] = function
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
