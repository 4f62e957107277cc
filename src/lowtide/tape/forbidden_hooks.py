"""Inside ``torch.func.grad``, ``vjp`` and their like nothing is taped: they forbid saved-tensor hooks.

They raise if any are in place when they begin. So ours are away inside, with their modes and the thread's observer:
what runs there runs as plain, and is no part of the step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch._functorch import eager_transforms

from lowtide.device.dispatch import UncompiledMode
from lowtide.step import module_calls
from lowtide.tape.switched_mode import hooks_in_place, modes_in_place, put_hooks, put_modes

_NAMES = ("_vjp_with_argnums", "grad_and_value_impl")  # what all of them come to
_is_watching = False


def watch() -> None:
    """From now on. Without hooks of ours in place it only passes on, so nothing ends it."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        for name in _NAMES:
            setattr(eager_transforms, name, _without_hooks(getattr(eager_transforms, name)))


def _without_hooks(transform: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(transform)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not any(_is_ours(pack) for pack, _ in hooks_in_place()):
            return transform(*args, **kwargs)
        with _ours_away():
            return transform(*args, **kwargs)

    return call


@contextmanager
def _ours_away() -> Iterator[None]:
    hooks, modes = hooks_in_place(), modes_in_place()
    observer, module_calls.thread_state.observer = module_calls.thread_state.observer, None
    put_hooks([pair for pair in hooks if not _is_ours(pair[0])])
    put_modes([mode for mode in modes if not isinstance(mode, UncompiledMode)])
    try:
        yield
    finally:
        put_hooks(hooks)
        put_modes(modes)
        module_calls.thread_state.observer = observer


def _is_ours(pack: object) -> bool:
    return isinstance(getattr(pack, "__self__", None), UncompiledMode)
