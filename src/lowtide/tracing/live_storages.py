"""Which storage of the graph each live tensor has, and whether the tensor is still as its op returned it."""

import weakref
from typing import Any

import torch

from lowtide.errors import UnsupportedModelError
from lowtide.graph.step_graph import DROP, FREE
from lowtide.tracing.graph_builder import GraphBuilder
from lowtide.tracing.module_calls import never_compiled
from lowtide.tracing.operators import allocated_bytes, storage_of


class LiveStorages:
    """Storage ids by the address of the storage; its death ends the entry and becomes an event."""

    def __init__(self, builder: GraphBuilder) -> None:
        self._builder = builder
        self._ids: dict[int, int] = {}
        self._references: dict[int, weakref.ref] = {}
        self._freed: set[int] = set()  # storages that Python has let go while a tape still holds them

    def find(self, tensor: torch.Tensor) -> int | None:
        """The id of a tensor's storage; None if it has none yet."""
        storage = storage_of(tensor)
        return None if storage is None else self._ids.get(storage._cdata)

    def id_of(
        self, tensor: torch.Tensor, kind: str = "other", *, op: int | None = None, output: int = 0, fixed: str = ""
    ) -> int | None:
        """The id of a tensor's storage. A storage never seen before is added: made by ``op``, or there before the step.

        None for a tensor without one plain storage.
        """
        storage = storage_of(tensor)
        if storage is None:
            return None
        number = self._ids.get(storage._cdata)
        if number is None:
            number = self._builder.add_storage(allocated_bytes(storage), kind, op=op, output=output, fixed=fixed)
            self._add(storage, number, None if op is None else (FREE, number))
        return number

    def add_copy(self, tensor: torch.Tensor, saved: int) -> None:
        """Backward ops that touch ``tensor`` touch what was stored as ``saved``; its death is the DROP of ``saved``."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ids:
            self._add(storage, self._builder.saved[saved], (DROP, saved))

    def add_remade(self, tensor: torch.Tensor, number: int) -> None:
        """``tensor`` holds again what a tape had released of storage ``number``; its death is no event."""
        self._add(tensor.untyped_storage(), number, None)

    def note_free(self, number: int) -> None:
        """Python holds the storage no more; a tape, which does, is no part of the step."""
        if number not in self._freed:
            self._freed.add(number)
            self._builder.add_event(FREE, number)

    def _add(self, storage: torch.UntypedStorage, number: int, death: tuple[int, int] | None) -> None:
        """``storage`` has the id ``number`` until it dies, which is the event ``death``."""
        key, builder = storage._cdata, self._builder

        @never_compiled
        def died(_: Any) -> None:
            self._ids.pop(key, None)
            self._references.pop(key, None)
            if death is not None and number not in self._freed:
                builder.add_event(*death)

        self._ids[key], self._references[key] = number, weakref.ref(storage, died)

    def stop(self) -> None:
        """Deaths count no more."""
        self._references.clear()


class DataAssignedError(UnsupportedModelError):
    """A tensor was given other memory after something had read it."""


class DataAssignmentGuard:
    """Refuses tensors that were given other memory, or another shape, through ``.data``: ``x.data = x.data.t()``.

    Such an assignment moves no version counter. A replay relies on what an op returned still being described as the op
    returned it, and plain backward sees the new data where a saved-tensor hook kept the old.
    """

    def __init__(self, builder: GraphBuilder) -> None:
        self._builder = builder
        # By id of the tensor its storage and metadata; the weak reference proves that the id has not been used again.
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
            DataAssignedError: something had read it before.
        """
        made = self._made.get(id(tensor))
        if made is None:
            return
        reference, storage, metadata = made
        assigned = reference() is tensor and metadata != _metadata(tensor)
        if not assigned:
            return
        self._builder.fix(storage, "was given other memory or another shape through .data")
        self.add(tensor, storage)
        if self._builder.was_read(storage):
            raise DataAssignedError(
                f"in module {self._builder.path} a tensor of shape {list(tensor.shape)} was assigned to "
                "(x.data = ...) after an operator had read it.\n  Its backward and its replay would read the new data, "
                "which no version tells of.\nAssign to the name (x = ...), or to .data before anything reads x."
            )


def _metadata(tensor: torch.Tensor) -> tuple:
    return (
        tensor.untyped_storage().data_ptr(), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype,
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip
