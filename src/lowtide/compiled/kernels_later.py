"""Kernels of generated code that are compiled when they are wanted: to read the code none is.

Inductor's module asks for its kernels when it is loaded. What it gets here stands in their place, and a kernel that is
called all the same is compiled then.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch._inductor.async_compile import AsyncCompile

from lowtide.compiled.kernel_batches import Batch, CppSource, batches_of
from lowtide.compiled.summation_order import sums_in_triton

_CPP = "cpp_pybinding"
_COMPILERS = (_CPP, "triton")


class _Kernel:
    """Stands in a module for a kernel that is not compiled yet.

    Attributes:
        source: Of a kernel in C++; None: of another.
        text: Of a kernel of Triton that adds up; "": of another.
        batch: Which kernels it is compiled with, and its place among them; None: it is compiled alone.
    """

    def __init__(self, begin: Callable[[], Any], source: CppSource | None, text: str = "") -> None:
        self._begin, self.source, self.text = begin, source, text
        self.batch: tuple[Batch, int] | None = None
        self._begun: Any = None
        self._made: Any = None

    @property
    def is_begun(self) -> bool:
        return self._begun is not None or self.batch is not None

    def begin(self) -> None:
        """Have the compiler start, where it runs beside this process."""
        if not self.is_begun:
            self._begun = self._begin()

    def made(self) -> Any:
        """The kernel, once it is compiled."""
        if self._made is None and self.batch is not None:
            batch, place = self.batch
            self._made = batch.kernel(place)
            self.batch = None
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
    """Those of the code that is made inside ``held()``.

    Args:
        plain: Those of the layer as PyTorch compiles it. What this code has in common with that is compiled once.
    """

    def __init__(self, plain: KernelsLater | None = None) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []
        self._known: dict[CppSource, _Kernel] = {} if plain is None else plain._known
        self._plain = plain
        self._adding: dict[str, Any] = {}  # Triton's kernels that add up, by their text

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, code is made without kernels."""
        wait = AsyncCompile.wait

        def note(compiler: AsyncCompile, scope: dict[str, Any]) -> None:
            self._places += [(scope, name) for name, value in scope.items() if isinstance(value, _Kernel)]
            wait(compiler, scope)

        def hold(name: str) -> Callable[..., _Kernel]:
            make = getattr(AsyncCompile, name)

            def held(compiler: AsyncCompile, *args: Any, **kwargs: Any) -> _Kernel:
                source = CppSource(tuple(args[0]), args[1]) if name == _CPP else None
                text = args[1] if source is None and sums_in_triton(args[1]) else ""
                kernel = _Kernel(partial(make, compiler, *args, **kwargs), source, text)
                if source is None or self._plain is not None:
                    return kernel if source is None else self._known.get(source, kernel)
                return self._known.setdefault(source, kernel)

            return held

        with ExitStack() as patched:
            patched.enter_context(patch.object(AsyncCompile, "wait", note))
            for name in _COMPILERS:
                patched.enter_context(patch.object(AsyncCompile, name, hold(name)))
            yield

    def begin(self) -> None:
        """Have the compiler start, where it runs beside this process. ``compile`` waits for it.

        The plain code's kernels are compiled one by one, as PyTorch does: its cache may have them. Others are compiled
        together.
        """
        waiting = [(id(scope), kernel) for scope, _, kernel in self._held() if not kernel.is_begun]
        for module in dict.fromkeys(scope for scope, _ in waiting):
            kernels = [kernel for scope, kernel in waiting if scope == module]
            sources = {kernel.source: kernel for kernel in kernels if kernel.source is not None}
            if self._plain is not None:
                for kernel, batch in zip(sources.values(), batches_of(list(sources)), strict=True):
                    kernel.batch = batch
            for kernel in kernels:
                kernel.begin()

    def compile(self) -> None:
        """Put the kernels into their places.

        The plain code should have run before: where PyTorch would time several block sizes of a kernel that adds up,
        those of the plain code's kernel of the same sizes are taken. Others would add up in another order.
        """
        self.begin()
        for scope, name, kernel in self._held():
            scope[name] = made = kernel.made()
            if kernel.text:
                self._adding[kernel.text] = made
                if self._plain is not None and len(made.launchers) > 1:
                    _take_blocks(made, self._plain._blocks_for(kernel.text))
        self._places.clear()

    def blocks(self) -> dict[str, str]:
        """Block sizes of Triton's kernels that add up, by their text. One that is still to be timed is left out."""
        decided = {text: kernel.launchers for text, kernel in self._adding.items() if len(kernel.launchers) == 1}
        return {text: _blocks_of(launcher) for text, (launcher,) in decided.items()}

    def _blocks_for(self, text: str) -> list[str]:
        """Block sizes of the kernels that add up so many values, those first that have most in common with ``text``."""
        sizes = sums_in_triton(text)[0]
        found = {other: blocks for other, blocks in self.blocks().items() if sums_in_triton(other)[0] == sizes}
        lines = _lines(text)
        return [found[other] for other in sorted(found, key=lambda other: -(_lines(other) & lines).total())]

    def _held(self) -> list[tuple[dict[str, Any], str, _Kernel]]:
        return [(scope, name, scope[name]) for scope, name in self._places if isinstance(scope[name], _Kernel)]


def _take_blocks(kernel: Any, wanted: list[str]) -> None:
    offered = {_blocks_of(launcher): launcher for launcher in kernel.launchers}
    if taken := [offered[blocks] for blocks in wanted if blocks in offered]:
        kernel.launchers = taken[:1]


def _lines(text: str) -> Counter[str]:
    """Those of a kernel, whatever its values are called."""
    return Counter(re.sub(r"\b(tmp|in_ptr|out_ptr|in_out_ptr)\d+", r"\1", line.strip()) for line in text.splitlines())


def _blocks_of(launcher: Any) -> str:
    config = launcher.config
    return f"{sorted(config.kwargs.items())} in {config.num_warps} warps"
