"""Where a running step is seen: dispatch modes, saved-tensor hooks and the thread's observer, in place and away again.

What opens and closes as one block of code goes through ``with``. Three ways are for what does not:

- ``SwitchedMode`` comes and goes as the module calls of a region need it. An op costs microseconds under a mode that
  does nothing, and so does each tensor that autograd stores under hooks.
- ``Seam`` is in place from the model's call to the end of the backward that follows.
- ``ours_away``: all of them, whatever they are, for work that is no part of any step.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import _current_autograd_node as current_node
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
from lowtide.step.module_calls import thread_state

# Nodes whose formula asks whether a mode looks on (``areAnyTensorSubclassLike`` in ATen), and gives other bits then: of
# some 200 functions these (``test_modes_change_no_bits``). Those of one number of many differ in the signs of zeros;
# that of ``cumprod`` takes more memory from 2.13 on, and has other bits before.
_ASKS_FOR_MODES = frozenset(
    {"ProdBackward0", "ProdBackward1", "MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0",
     "CumprodBackward0"}
)  # fmt: skip
_ASKS_UNDER_CREATE_GRAPH = _ASKS_FOR_MODES | {"LinalgDetBackward0"}

Hooks = tuple[Callable[..., Any], Callable[..., Any]]


class HookedMode(UncompiledMode):
    """A mode of ours with saved-tensor hooks of its own."""

    def pack(self, tensor: torch.Tensor) -> Any:
        raise NotImplementedError

    def unpack(self, packed: Any) -> torch.Tensor:
        raise NotImplementedError


class SwitchedMode(HookedMode):
    """What is in place stays below the modes and hooks that others put on top meanwhile.

    Attributes:
        watches, hooks: Mode and hooks are in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watches = self.hooks = False
        self._modes_below = 0  # where the mode goes
        self._hooks_below: Hooks | None = None  # those that ours go on

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


class _Here(threading.local):
    """What is open on this thread."""

    def __init__(self) -> None:
        self.seams: list[Seam] = []


_here = _Here()


class Seam:
    """A mode and its hooks, in place on the thread that opened it while it is open, below all that others have there.

    A mode of the user's that opens or closes meanwhile pops itself and not ours.
    """

    def __init__(self, mode: HookedMode) -> None:
        self._mode = mode
        self._thread: threading.Thread | None = None
        self._is_open = False

    @property
    def is_here(self) -> bool:
        return self._thread is threading.current_thread()

    @property
    def is_elsewhere(self) -> bool:
        """In place on another thread, which still runs."""
        return self._thread is not None and not self.is_here and self._thread.is_alive()

    def open(self) -> None:
        self._is_open = True
        self._put_in_place()

    def _put_in_place(self) -> None:
        self._thread = threading.current_thread()
        insert_mode(self._mode)
        insert_hooks((self._mode.pack, self._mode.unpack))
        _here.seams.append(self)

    def close(self) -> None:
        """Take mode and hooks away. From another thread they cannot be reached, and stay."""
        self._is_open = False
        self._take_away()

    def _take_away(self) -> None:
        if self.is_here:
            remove_mode(self._mode)
            remove_hooks((self._mode.pack, self._mode.unpack))
            _here.seams.remove(self)
            self._thread = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, mode and hooks are away. They stay so if the seam is closed there.

        Where the mode is off already, work of our own runs, which is no other model's.
        """
        if not self.is_here or not is_on(self._mode):
            yield
            return
        self._take_away()
        try:
            yield
        finally:
            if self._is_open:
                self._put_in_place()


class ModelSeams:
    """Those of one model's steps. A model that is dropped in the middle of a step leaves none in place."""

    def __init__(self, model: nn.Module) -> None:
        self._open: list[Seam] = []
        self._left_behind: list[Seam] = []  # of steps that are over, in place on threads that are not this one
        weakref.finalize(model, _close_all, self._open).atexit = False

    def open(self, mode: HookedMode) -> Seam:
        seam = Seam(mode)
        seam.open()
        self._open.append(seam)
        return seam

    def close(self, seam: Seam) -> None:
        """What another thread has in place goes when that thread calls the model next."""
        seam.close()
        self._open.remove(seam)
        if seam.is_elsewhere:
            self._left_behind.append(seam)

    def close_left_behind(self) -> None:
        """What steps that are over have left on this thread."""
        _close_all(self._left_behind)
        self._left_behind = [seam for seam in self._left_behind if seam.is_elsewhere]

    def others_suspended(self) -> AbstractContextManager[None]:
        """Inside, what other models have in place here is away: a call of one model is in no other model's step."""
        return _suspended([seam for seam in _here.seams if seam not in self._open])

    def suspended(self, seams: list[Seam]) -> AbstractContextManager[None]:
        """Inside, ``seams`` are away, as far as they are on this thread."""
        return _suspended([seam for seam in seams if seam.is_here])


@contextmanager
def _suspended(seams: list[Seam]) -> Iterator[None]:
    with ExitStack() as away:
        for seam in seams:
            away.enter_context(seam.suspended())
        yield


def _close_all(seams: list[Seam]) -> None:
    for seam in seams:
        seam.close()


# -- all of ours --------------------------------------------------------------------------------------------


def hooks_of_ours_are_on() -> bool:
    """Whether any are in place on this thread."""
    return any(_is_ours(pack) for pack, _ in hooks_in_place())


def anything_of_ours_is_on() -> bool:
    """Whether hooks or a mode of ours are in place on this thread."""
    return hooks_of_ours_are_on() or any(isinstance(mode, UncompiledMode) for mode in modes_in_place())


@contextmanager
def ours_away() -> Iterator[None]:
    """Inside, no mode, hooks or observer of ours is in place on this thread."""
    hooks, modes = hooks_in_place(), modes_in_place()
    put_hooks([pair for pair in hooks if not _is_ours(pair[0])])
    put_modes([mode for mode in modes if not isinstance(mode, UncompiledMode)])
    try:
        with thread_state.observed_by(None):
            yield
    finally:
        put_hooks(hooks)
        put_modes(modes)


def _is_ours(pack: object) -> bool:
    return isinstance(getattr(pack, "__self__", None), UncompiledMode)


def step_aside() -> bool:
    """Called where autograd hands out what it saved: whether our modes left the node that it hands it to.

    The engine puts them back for the next node. With a mode on top, the gradient of ``prod`` takes another formula,
    with other bits and three times the memory.
    """
    node = current_node()
    if node is None or node.name() not in (_ASKS_UNDER_CREATE_GRAPH if torch.is_grad_enabled() else _ASKS_FOR_MODES):
        return False
    modes = modes_in_place()
    ours = [mode for mode in modes if isinstance(mode, UncompiledMode)]
    if not all(mode.may_step_aside for mode in ours):
        return False
    put_modes([mode for mode in modes if mode not in ours])
    return bool(ours)


# -- this thread's stacks -----------------------------------------------------------------------------------


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
