"""Where a watch meets the training loop: from the model's call to the end of the backward that follows.

The dispatch mode and the pair of saved-tensor hooks go to the bottom of the thread's stacks. A mode of the user's that
opens or closes meanwhile then pops itself and not ours.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as push_hooks
from torch._C._autograd import _top_saved_tensors_default_hooks as top_hooks
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

Hooks = tuple[Callable[..., Any], Callable[..., Any]]


class Seam:
    """A mode and a pair of hooks that are in place, on the thread that opened it, while it is open."""

    def __init__(self, mode: TorchDispatchMode, hooks: Hooks) -> None:
        self._mode, self._hooks = mode, hooks
        self._thread: threading.Thread | None = None

    @property
    def is_here(self) -> bool:
        return self._thread is threading.current_thread()

    @property
    def is_elsewhere(self) -> bool:
        """In place on another thread, which still runs."""
        return self._thread is not None and not self.is_here and self._thread.is_alive()

    def open(self) -> None:
        self._thread = threading.current_thread()
        _insert_below(self._mode)
        _insert_hooks_below(self._hooks)

    def close(self) -> None:
        """Take mode and hooks away. From another thread they cannot be reached, and stay."""
        if self.is_here:
            _remove(self._mode)
            _remove_hooks(self._hooks)
            self._thread = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, mode and hooks are away."""
        if not self.is_here:
            yield
            return
        self.close()
        try:
            yield
        finally:
            self.open()


def _insert_below(mode: TorchDispatchMode) -> None:
    others = [_pop_mode() for _ in range(len(_get_current_dispatch_mode_stack()))]
    _push_mode(mode)
    for other in reversed(others):
        _push_mode(other)


def _remove(mode: TorchDispatchMode) -> None:
    if mode not in _get_current_dispatch_mode_stack():
        return
    others = [_pop_mode() for _ in range(len(_get_current_dispatch_mode_stack()))]
    for other in reversed(others):
        if other is not mode:
            _push_mode(other)


def _insert_hooks_below(hooks: Hooks) -> None:
    others = _pop_all_hooks()
    push_hooks(*hooks)
    for pair in reversed(others):
        push_hooks(*pair)


def _remove_hooks(hooks: Hooks) -> None:
    for pair in reversed(_pop_all_hooks()):
        if pair[0] != hooks[0]:
            push_hooks(*pair)


def _pop_all_hooks() -> list[Hooks]:
    """From the top down."""
    pairs: list[Hooks] = []
    while (top := top_hooks(True)) is not None:
        pairs.append(top)
        pop_hooks()
    return pairs
