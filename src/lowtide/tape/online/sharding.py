"""The online tape and a sharded model: gathering and freeing, and writes to what closed windows will read.

What a window's values are made from is there when its backward begins, since their parameters are gathered for it. So
they may go as soon as they are proven, and that is done while the window is open. What crosses a window stays.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch._C import _AutoDispatchBelowADInplaceOrView as below_autograd
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.device.dispatch import bytes_of
from lowtide.step.sharding.observer import PauseDuringSharding, ShardingObserver
from lowtide.step.sharding.windows import OpenWindows
from lowtide.tape.online.online_values import MARK, Recipe, StoredValue
from lowtide.tape.online.replays import chain_of


class OnlineSharding(PauseDuringSharding):
    """Gathering and freeing leaves no recipes, and its memory counts."""

    def __init__(self, tape: Any, other: ShardingObserver | None, windows: OpenWindows) -> None:
        super().__init__(tape, other)
        self._online, self._windows = tape, windows

    def gathering(self, whole: list[torch.Tensor]) -> None:
        tape = self._online
        sizes = [(t.untyped_storage(), t.numel() * t.itemsize) for t in whole]
        if not tape.problem:
            tape.guarded(tape.releaser.make_room, sum(size for _, size in sizes))
        for storage, size in sizes:
            tape.live.add(storage, size)
        super().gathering(whole)

    def gathering_done(self, whole: list[torch.Tensor], *, again: bool) -> None:
        self._windows.note_gathered(whole, again=again)

    def closing(self) -> None:
        tape = self._online
        if not (tape.is_paused or tape.problem):
            tape.guarded(tape.releaser.prove_window, self._windows.around_caller)

    def freed(self, whole: list[torch.Tensor]) -> None:
        for tensor in whole:
            self._online.live.forget(tensor.untyped_storage())
        super().freed(whole)


def is_closed(value: StoredValue) -> bool:
    """A released value that cannot be made again now, and can when its window opens."""
    return chain_of([value]) is None and chain_of([value], later=True) is not None


def copy_before_write(value: StoredValue | None, storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Released values of closed windows are made from ``storage``, which is about to be written: ``value`` is the copy.

    Autograd's own interest in ``value`` meets plain autograd's error. Returns the copy.
    """
    with _disable_current_modes(), below_autograd():
        copy = bytes_of(storage).clone()
    if value is not None:
        del storage.__dict__[MARK]
        value.move_to(copy)
    return copy.untyped_storage()


def read_copies(recipes: Iterable[Recipe], storage: torch.UntypedStorage, copy: torch.UntypedStorage) -> None:
    """``recipes`` read ``copy`` instead of ``storage`` from now on."""
    for recipe in recipes:
        for kept in recipe.outside:
            tensor = kept.tensor
            if tensor.untyped_storage()._cdata == storage._cdata:
                with _disable_current_modes(), torch.no_grad(), below_autograd():
                    found = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                    found.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())
                kept.tensor, kept.version = found, found._version
