"""Which module call an op runs in: a guarded callable in every submodule's ``_compiled_call_impl``.

``nn.Module.__call__`` looks there first, so no class, parameter name or state dict changes; deepcopy and pickle
drop it (``Module.__getstate__`` does), and ``try/finally`` holds where forward hooks do not (KeyboardInterrupt
leaves an ``always_call`` hook's mode on).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

NO_GRAD = "(no gradients)"  # a frame for calls of the model itself without gradients: seen by a trace, never taped


class Watcher(Protocol):
    """What wants to know which module call runs: the tracer's recorder, or the tape."""

    def enter(self, path: str) -> None: ...
    def leave(self) -> None: ...


class _Active(threading.local):
    watcher: Watcher | None = None


active = _Active()  # per thread: another thread's forward is not this step's


class ScopedCall:
    """Calls the module as before, telling the thread's watcher when it starts and ends."""

    __slots__ = ("_module", "path")

    def __init__(self, module: nn.Module, path: str) -> None:
        self._module = weakref.ref(module)  # strong would make a cycle through the module and delay its memory
        self.path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None  # it is running
        watcher = active.watcher
        if watcher is None:
            return module._call_impl(*args, **kwargs)
        watcher.enter(self.path)
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            watcher.leave()


def install(model: nn.Module, root: Callable[..., Any] | None = None) -> Callable[[], None]:
    """Put a ``ScopedCall`` on every submodule, ``root`` (or one more) on the model itself; returns the undo."""
    placed: list[tuple[weakref.ref[nn.Module], Any, Any]] = []
    for path, module in model.named_modules():
        call = root if root is not None and module is model else ScopedCall(module, path)
        placed.append((weakref.ref(module), call, module._compiled_call_impl))
        module._compiled_call_impl = call

    def undo() -> None:
        for reference, call, before in placed:
            module = reference()
            if module is not None and module._compiled_call_impl is call:
                module._compiled_call_impl = before

    return undo


def call_signature(model: nn.Module, args: tuple, kwargs: dict) -> str:
    """What decides which ops a call runs, as text: shapes, dtypes, plain values, training flag, autocast."""
    parts = ["train" if model.training else "eval"]
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            parts.append(f"autocast({device},{_short(torch.get_autocast_dtype(device))})")
    parts += [_describe(a) for a in args]
    parts += [f"{name}={_describe(kwargs[name])}" for name in sorted(kwargs)]
    return " ".join(parts)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        grad = "*" if value.requires_grad else ""
        return f"{_short(value.dtype)}{list(value.shape)}{grad}".replace(" ", "")
    if isinstance(value, (list, tuple)):
        return "(" + ",".join(map(_describe, value)) + ")"
    if isinstance(value, dict) or hasattr(value, "items"):
        return "{" + ",".join(f"{k}:{_describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, float):  # an annealed weight is another number each step and decides no shape
        return "float"
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    return type(value).__name__


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
