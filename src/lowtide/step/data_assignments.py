"""Tensors that are given other memory, or another shape, through ``.data``: found when they are read again."""

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from lowtide.errors import UnsupportedModelError

T = TypeVar("T")  # what stands for a storage
OTHER_MEMORY = "was given other memory or another shape through .data"


class DataAssignedError(UnsupportedModelError):
    """A tensor was given other memory after something had read it."""


class DataAssignmentGuard(Generic[T]):
    """Refuses tensors that were given other memory, or another shape, through ``.data``: ``x.data = x.data.t()``.

    Such an assignment moves no version counter. A replay relies on what an op returned still being described as the op
    returned it, and plain backward sees the new data where a saved-tensor hook kept the old.

    Args:
        on_assigned: Told of each storage whose tensor was assigned to, as ``add`` was given it.
        was_read: Whether an op has read a storage.
        where: Names the module call that runs.
    """

    def __init__(
        self, on_assigned: Callable[[T], object], was_read: Callable[[T], bool], where: Callable[[], str]
    ) -> None:
        self._on_assigned, self._was_read, self._where = on_assigned, was_read, where
        # By id of the tensor its storage and metadata; the weak reference proves that the id has not been used again.
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], T, tuple]] = {}

    def add(self, tensor: torch.Tensor, storage: T) -> None:
        """An op returned ``tensor`` over a new storage."""
        if not tensor.is_inference():  # autograd stores none of those
            self._made[id(tensor)] = weakref.ref(tensor), storage, _metadata(tensor)

    def add_view(self, tensor: torch.Tensor, storage: T, *, written: bool) -> None:
        """An op returned ``tensor`` over a known storage: a view, or (``t_()``) a tensor of another shape now."""
        if not written or id(tensor) in self._made:
            self.add(tensor, storage)

    def check(self, tensor: torch.Tensor) -> None:
        """Tell of the storage of ``tensor`` if it was assigned to.

        Raises:
            DataAssignedError: something had read it before.
        """
        made = self._made.get(id(tensor))
        if made is None:
            return
        reference, storage, metadata = made
        assigned = reference() is tensor and metadata != _metadata(tensor)
        if not assigned:
            return
        self._on_assigned(storage)
        self.add(tensor, storage)
        if self._was_read(storage):
            raise DataAssignedError(
                f"in module {self._where()} a tensor of shape {list(tensor.shape)} was assigned to "
                "(x.data = ...) after an operator had read it.\n  Its backward and its replay would read the new data, "
                "which no version tells of.\nAssign to the name (x = ...), or to .data before anything reads x."
            )


def _metadata(tensor: torch.Tensor) -> tuple:
    # The storage and not its address: ``device/packing.py`` moves memory, and the tensor is still over it.
    return (
        tensor.untyped_storage()._cdata, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype,
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip
