"""Inside ``torch.func.grad``, ``vjp`` and their like, and at levels of forward-mode AD, nothing is taped.

The former forbid saved-tensor hooks: they raise if any are in place when they begin. Formulas of the latter ask whether
a dispatch mode is there, as that of a layer norm, and give other bits then. So all of ours is away inside, the thread's
observer too: what runs there runs as plain, and is no part of the step. ``torch.func.jvp`` forbids nothing, and its
tensors are wrapped, for which formulas do the same with and without a mode: its ops are seen.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from lowtide.step.seam import anything_of_ours_is_on, hooks_of_ours_are_on, ours_away

_NAMES = ("_vjp_with_argnums", "grad_and_value_impl")  # what all of them come to
_is_watching = False
_away = ExitStack()  # while the lowest level of forward-mode AD is entered: PyTorch has one for all threads


def watch() -> None:
    """From now on. Without anything of ours in place it only passes on, so nothing ends it."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        for name in _NAMES:
            setattr(eager_transforms, name, _without_hooks(getattr(eager_transforms, name)))
        forward_ad.enter_dual_level = _entering(forward_ad.enter_dual_level)
        forward_ad.exit_dual_level = _exiting(forward_ad.exit_dual_level)


def is_in_forward_mode() -> bool:
    """Whether a level of forward-mode AD is entered."""
    return forward_ad._current_level >= 0


def is_inside_transform() -> bool:
    """Whether one of ``torch.func`` is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _without_hooks(transform: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(transform)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not hooks_of_ours_are_on():
            return transform(*args, **kwargs)
        with ours_away():
            return transform(*args, **kwargs)

    return call


def _entering(enter: Callable[[], int]) -> Callable[[], int]:
    @wraps(enter)
    def call() -> int:
        passes_on = is_in_forward_mode() or is_inside_transform() or torch.compiler.is_compiling()
        if not passes_on and anything_of_ours_is_on():
            _away.enter_context(ours_away())
        return enter()

    return call


def _exiting(leave: Callable[..., None]) -> Callable[..., None]:
    @wraps(leave)
    def call(*, level: int | None = None) -> None:
        leave(level=level)
        if not is_in_forward_mode():
            _away.close()

    return call
