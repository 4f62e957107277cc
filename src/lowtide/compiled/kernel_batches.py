"""Kernels in C++ that one compiler compiles together: it takes half a second for any file, and little for a kernel.

Nearly all of that goes into reading PyTorch's headers, though they are precompiled. Inductor gives each kernel a file
of its own. Here those of one module share a few: each with its Python binding in a namespace, all else as Inductor
writes it. PyTorch's cache keeps what comes of it, by the text.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.exc import CppCompileError

_ENTRY = 'extern "C"'
_INCLUDE = re.compile(r"^#include .*$", re.MULTILINE)
_HEADERS = "#define PY_SSIZE_T_CLEAN\n#include <Python.h>\n#include <sstream>\n#include <cstdlib>\n#include <cerrno>\n"


class CppSource(NamedTuple):
    """A kernel as Inductor writes it, which gives it the name ``kernel``."""

    argument_types: tuple[str, ...]
    text: str

    @property
    def can_share(self) -> bool:
        """It has one entry and defines nothing that its neighbours in a file would see."""
        return self.text.count(_ENTRY) == 1 and "#define" not in self.text


class Batch:
    """Kernels that are compiled in one file, which begins at once where compilers run beside this process."""

    def __init__(self, sources: Sequence[CppSource]) -> None:
        submit = AsyncCompile.submit if get_compile_threads() > 1 else None
        self._load: Callable[[], Any] = _Shared.load_async(_text_of(sources), "cpu", submit_fn=submit)

    def kernel(self, number: int) -> Callable[..., None] | None:
        """Once it is compiled; None where the compiler does not take the file."""
        try:
            first = self._load()
        except CppCompileError:
            return None
        name = _name(number)
        if number:
            first = _loaded(first.__file__, f"{first.__name__.rpartition('.')[0]}.{name}")
        found: Callable[..., None] = getattr(first, name)
        return found


class _Shared(CppPythonBindingsCodeCache):
    """Loads the module of the first kernel."""

    entry_function = "kernel_0"


def batches_of(sources: Sequence[CppSource]) -> list[tuple[Batch, int] | None]:
    """By kernel the batch that it is in, with its place there; None: it is better compiled alone.

    As many files as half of the compilers: a module comes with that of its backward. Which kernels share one depends on
    these sources alone, so that a later run finds the same files.
    """
    found: list[tuple[Batch, int] | None] = [None] * len(sources)
    sharing = sorted((i for i, source in enumerate(sources) if source.can_share), key=lambda i: -len(sources[i].text))
    num_files = max(1, get_compile_threads() // 2)
    for first in range(num_files):
        places = sharing[first::num_files]
        if len(places) < 2:
            continue
        batch = Batch([sources[i] for i in places])
        for number, place in enumerate(places):
            found[place] = batch, number
    return found


def _text_of(sources: Sequence[CppSource]) -> str:
    includes = dict.fromkeys(line for source in sources for line in _INCLUDE.findall(source.text))
    parts = ["\n".join(includes), "\n", _HEADERS]
    for number, source in enumerate(sources):
        types = (kind.replace("const ", "") for kind in source.argument_types)
        arguments = ", ".join(f"parse_arg<{kind}>(args, {i})" for i, kind in enumerate(types))
        binding = CppPythonBindingsCodeCache.suffix_template.format(
            arg_len=len(source.argument_types),
            call_entry_func=CppPythonBindingsCodeCache.call_entry_function.format(arguments),
            entry_func=_name(number),
            extra_parse_arg="",
        )
        # In C a function has one name in all namespaces.
        kernel = _INCLUDE.sub("", source.text).replace(_ENTRY, "")
        parts.append(f"namespace lowtide_{number} {{\n{kernel}\n{_INCLUDE.sub('', binding)}\n}}\n")
    return "".join(parts)


def _name(number: int) -> str:
    return f"kernel_{number}"


def _loaded(path: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
