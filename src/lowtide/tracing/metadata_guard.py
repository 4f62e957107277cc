"""Which tensors were given other memory, or another shape, without a write that counts: ``x.data = x.data.t()``.

Whoever reads what an op returned, and reads it just so, needs no description of it; the tape relies on that. And
autograd holds its inputs themselves, so plain backward sees through such an assignment what a hook has put aside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


class MetadataGuard:
    """What memory the tensors that ops returned had at first, and how they looked at it."""

    def __init__(self) -> None:
        # By id, with a proof of identity: the storage and the look it had.
        self._made: dict[int, tuple[Callable[[], torch.Tensor | None], int, tuple]] = {}

    def made(self, tensor: torch.Tensor, storage: int) -> None:
        if not tensor.is_inference():  # autograd stores none of those
            self._made[id(tensor)] = weakref.ref(tensor), storage, _look(tensor)

    def returned(self, tensor: torch.Tensor, storage: int, *, written: bool) -> None:
        """An op returned it over a storage that there was: a view, or (``t_()``) one that now looks otherwise."""
        if not written or id(tensor) in self._made:
            self.made(tensor, storage)

    def before(self, tensor: torch.Tensor) -> int | None:
        """The storage that ``tensor`` was made with, if it is given another by now, or looks otherwise."""
        made = self._made.get(id(tensor))
        if made is None:
            return None
        reference, storage, look = made
        return storage if reference() is tensor and look != _look(tensor) else None


def _look(tensor: torch.Tensor) -> tuple:
    return (
        tensor.untyped_storage().data_ptr(), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype,
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip
