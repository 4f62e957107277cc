"""Refuses tensors that were given other memory, or another shape, through ``.data``: ``x.data = x.data.t()``.

Such an assignment moves no version counter. A replay relies on what an op returned still being described as the op
returned it, and plain backward sees the new data where a saved-tensor hook kept the old.
"""

import weakref

import torch

from lowtide.errors import UnsupportedModelError
from lowtide.tracing.graph_builder import GraphBuilder


class DataAssignmentGuard:
    """The memory, shape and strides with which ops returned their tensors."""

    def __init__(self, builder: GraphBuilder) -> None:
        self._builder = builder
        # By id of the tensor; the weak reference proves that the id has not been used again.
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], int, tuple]] = {}

    def add(self, tensor: torch.Tensor, storage: int) -> None:
        """An op returned ``tensor`` over a new storage."""
        if not tensor.is_inference():  # autograd stores none of those
            self._made[id(tensor)] = weakref.ref(tensor), storage, _metadata(tensor)

    def add_view(self, tensor: torch.Tensor, storage: int, *, written: bool) -> None:
        """An op returned ``tensor`` over a known storage: a view, or (``t_()``) a tensor of another shape now."""
        if not written or id(tensor) in self._made:
            self.add(tensor, storage)

    def check(self, tensor: torch.Tensor) -> None:
        """Fix the storage of ``tensor`` if it was assigned to.

        Raises:
            UnsupportedModelError: something had read it before.
        """
        made = self._made.get(id(tensor))
        if made is None:
            return
        reference, storage, metadata = made
        if reference() is not tensor or metadata == _metadata(tensor):
            return
        self._builder.fix(storage, "was given other memory or another shape through .data")
        self.add(tensor, storage)
        if self._builder.was_read(storage):
            raise UnsupportedModelError(
                f"in module {self._builder.path} a tensor of shape {list(tensor.shape)} was assigned to "
                "(x.data = ...) after an operator had read it.\n  Its backward and its replay would read the new data, "
                "which no version tells of.\nAssign to the name (x = ...), or to .data before anything reads x."
            )


def _metadata(tensor: torch.Tensor) -> tuple:
    return (
        tensor.untyped_storage().data_ptr(), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype,
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip
