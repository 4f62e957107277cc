"""Kernels of generated code that are compiled when they are wanted: to read the code none is.

Inductor's module asks for its kernels when it is loaded. What it gets here stands in their place, and a kernel that is
called all the same is compiled then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch._inductor.async_compile import AsyncCompile

_COMPILERS = ("cpp_pybinding", "triton")


class _Kernel:
    """Stands in a module for a kernel that is not compiled yet."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin
        self._begun: Any = None
        self._made: Any = None

    def begin(self) -> None:
        """Have the compiler start, where it runs beside this process."""
        if self._begun is None:
            self._begun = self._begin()

    def made(self) -> Any:
        """The kernel, once it is compiled."""
        if self._made is None:
            self.begin()
            wait = getattr(self._begun, "result", None)
            self._made = self._begun if wait is None else wait()
        return self._made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.made()(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """As Triton's are called."""
        return self.made().run(*args, **kwargs)


class KernelsLater:
    """Those of the code that is made inside ``held()``."""

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, code is made without kernels."""
        wait = AsyncCompile.wait

        def note(compiler: AsyncCompile, scope: dict[str, Any]) -> None:
            self._places += [(scope, name) for name, value in scope.items() if isinstance(value, _Kernel)]
            wait(compiler, scope)

        def hold(make: Callable[..., Any]) -> Callable[..., _Kernel]:
            return lambda compiler, *args, **kwargs: _Kernel(partial(make, compiler, *args, **kwargs))

        with ExitStack() as patched:
            patched.enter_context(patch.object(AsyncCompile, "wait", note))
            for name in _COMPILERS:
                patched.enter_context(patch.object(AsyncCompile, name, hold(getattr(AsyncCompile, name))))
            yield

    def begin(self) -> None:
        """Have the compiler start, where it runs beside this process. ``compile`` waits for it."""
        for _, _, kernel in self._held():
            kernel.begin()

    def compile(self) -> None:
        """Put the kernels into their places."""
        self.begin()
        for scope, name, kernel in self._held():
            scope[name] = kernel.made()
        self._places.clear()

    def _held(self) -> list[tuple[dict[str, Any], str, _Kernel]]:
        return [(scope, name, scope[name]) for scope, name in self._places if isinstance(scope[name], _Kernel)]
