"""Which storage of the graph each live tensor has; the death of a storage becomes an event."""

import weakref
from typing import Any

import torch

from lowtide.graph.step_graph import DROP
from lowtide.tracing.graph_builder import GraphBuilder
from lowtide.tracing.module_calls import never_compiled
from lowtide.tracing.operators import allocated_bytes, storage_of


class LiveStorages:
    """Storage ids by the address of the storage; an entry goes when the storage dies."""

    def __init__(self, builder: GraphBuilder) -> None:
        self._builder = builder
        self._ids: dict[int, int] = {}
        self._references: dict[int, weakref.ref] = {}

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
        return self.add(storage, kind, op=op, output=output, fixed=fixed) if number is None else number

    def add(
        self, storage: torch.UntypedStorage, kind: str, *, op: int | None = None, output: int = 0, fixed: str = ""
    ) -> int:
        """The id of a storage never seen before."""
        number = self._builder.add_storage(allocated_bytes(storage), kind, op=op, output=output, fixed=fixed)
        key, builder = storage._cdata, self._builder
        self._ids[key] = number

        @never_compiled
        def died(_: Any) -> None:
            self._ids.pop(key, None)
            self._references.pop(number, None)
            if op is not None:
                builder.add_free(number)

        self._references[number] = weakref.ref(storage, died)
        return number

    def add_copy(self, tensor: torch.Tensor, saved: int) -> None:
        """Backward ops that touch ``tensor`` touch what was stored as ``saved``; its death is the DROP of ``saved``."""
        storage = tensor.untyped_storage()
        key, builder = storage._cdata, self._builder
        if key in self._ids:
            return
        self._ids[key] = builder.saved[saved]
        marker = -key  # not ``saved``: a saved tensor may be unpacked again while its first copy lives

        @never_compiled
        def died(_: Any) -> None:
            self._ids.pop(key, None)
            self._references.pop(marker, None)
            builder.add_event(DROP, saved)

        self._references[marker] = weakref.ref(storage, died)

    def stop(self) -> None:
        """Deaths count no more."""
        self._references.clear()
