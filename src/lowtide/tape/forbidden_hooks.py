"""Inside ``torch.func.grad``, ``vjp`` and their like nothing is taped: they forbid saved-tensor hooks.

They raise if any are in place when they begin. So ours are away inside, with their modes and the thread's observer:
what runs there runs as plain, and is no part of the step.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._functorch import eager_transforms

from lowtide.step.seam import hooks_of_ours_are_on, ours_away

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
        if torch.compiler.is_compiling() or not hooks_of_ours_are_on():
            return transform(*args, **kwargs)
        with ours_away():
            return transform(*args, **kwargs)

    return call
