"""A dispatch mode with a pair of saved-tensor hooks, which come and go as the module calls of a region need them.

An op costs microseconds under a mode that does nothing, and so does each tensor that autograd stores under hooks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _get_dispatch_stack_at as mode_at
from torch._C import _len_torch_dispatch_stack as num_modes
from torch._C import _pop_torch_dispatch_stack as pop_mode
from torch._C import _push_on_torch_dispatch_stack as push_mode
from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as push_hooks
from torch._C._autograd import _saved_tensors_hooks_is_enabled as hooks_are_allowed
from torch._C._autograd import _top_saved_tensors_default_hooks as top_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.device.dispatch import UncompiledMode

Hooks = tuple[Callable[..., Any], Callable[..., Any]]


class SwitchedMode(UncompiledMode):
    """What is in place stays below the modes and hooks that others put on top meanwhile.

    Attributes:
        watches, hooks: Mode and hooks are in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watches = self.hooks = False
        self._modes_below = 0  # where the mode goes
        self._hooks_below: Hooks | None = None  # those that ours go on

    def pack(self, tensor: torch.Tensor) -> Any:
        raise NotImplementedError

    def unpack(self, packed: Any) -> torch.Tensor:
        raise NotImplementedError

    def start_here(self) -> None:
        """A region begins: what others have in place now is below."""
        self._modes_below = num_modes()
        self._hooks_below = top_hooks(True)

    def switch(self, *, watches: bool, hooks: bool) -> None:
        """Have mode and hooks in place, or not. Those of others on top keep ours there: only the top can be popped."""
        if watches and not self.watches:
            insert_mode(self, self._modes_below)
            self.watches = True
        elif self.watches and not watches and (num := num_modes()) and mode_at(num - 1) is self:
            pop_mode(None)
            self._modes_below = num_modes()
            self.watches = False
        if hooks and not self.hooks:
            if hooks_are_allowed():  # where somebody forbids them, autograd keeps what is dropped
                insert_hooks((self.pack, self.unpack), self._hooks_below)
                self.hooks = True
        elif self.hooks and not hooks and (top := top_hooks(True)) is not None and top[0] == self.pack:
            pop_hooks()
            self._hooks_below = top_hooks(True)
            self.hooks = False

    def take_away(self) -> None:
        """Neither is in place any more, whatever is on top."""
        self.switch(watches=False, hooks=False)
        if self.watches:
            remove_mode(self)
        if self.hooks:
            remove_hooks((self.pack, self.unpack))
        self.watches = self.hooks = False


def is_on(mode: TorchDispatchMode) -> bool:
    """Whether ``mode`` is on this thread's stack now. Around work of our own all modes are off."""
    return any(other is mode for other in modes_in_place())


def modes_in_place() -> list[TorchDispatchMode]:
    """This thread's modes, the lowest first."""
    return [mode_at(n) for n in range(num_modes())]


def put_modes(modes: list[TorchDispatchMode]) -> None:
    """Have these on this thread's stack, and no others."""
    for _ in range(num_modes()):
        pop_mode(None)
    for mode in modes:
        push_mode(mode)


def insert_mode(mode: TorchDispatchMode, num_below: int = 0) -> None:
    """Put ``mode`` on this thread's stack, with so many below it."""
    above = [pop_mode(None) for _ in range(num_modes() - num_below)]
    push_mode(mode)
    for other in reversed(above):
        push_mode(other)


def remove_mode(mode: TorchDispatchMode) -> None:
    """Take ``mode`` off this thread's stack, if it is there."""
    if not is_on(mode):
        return
    put_modes([other for other in modes_in_place() if other is not mode])


def hooks_in_place() -> list[Hooks]:
    """This thread's pairs of hooks, the lowest first."""
    pairs: list[Hooks] = []
    while (top := top_hooks(True)) is not None:
        pairs.append(top)
        pop_hooks()
    pairs.reverse()
    for pair in pairs:
        push_hooks(*pair)
    return pairs


def put_hooks(pairs: list[Hooks]) -> None:
    """Have these on this thread's stack, and no others."""
    while top_hooks(True) is not None:
        pop_hooks()
    for pair in pairs:
        push_hooks(*pair)


def insert_hooks(hooks: Hooks, below: Hooks | None = None) -> None:
    """Put ``hooks`` on this thread's stack right above ``below``; at the bottom if that is not there."""
    above: list[Hooks] = []
    while (top := top_hooks(True)) is not None and (below is None or top[0] != below[0]):
        above.append(top)
        pop_hooks()
    push_hooks(*hooks)
    for pair in reversed(above):
        push_hooks(*pair)


def remove_hooks(hooks: Hooks) -> None:
    """Take ``hooks`` off this thread's stack, if they are there."""
    put_hooks([pair for pair in hooks_in_place() if pair[0] != hooks[0]])
