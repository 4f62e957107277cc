"""Which storage of the graph each live tensor has."""

import weakref
from dataclasses import replace

import torch

from lowtide.graph.step_graph import DROP, FREE
from lowtide.hollow.memory import is_on_host
from lowtide.recording.graph_builder import GraphBuilder
from lowtide.step.module_calls import never_compiled
from lowtide.step.operators import allocated_bytes, storage_of

_NUMBER_BYTES = 16  # the largest is complex


class LiveStorages:
    """Storage ids by the address of the storage; its death ends the entry and becomes an event."""

    def __init__(self, builder: GraphBuilder, device: torch.device) -> None:
        """``device``: whose memory is counted; what lies elsewhere has 0 bytes of it."""
        self._builder = builder
        self._device = device
        self._ids: dict[int, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._adopted: set[int] = set()
        self._freed: set[int] = set()  # storages that Python has let go while a tape still holds them
        self.makes_unseen = False  # a node of backward has run unseen

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
            # A random kernel's seed may be a number on the CPU.
            device = storage.device
            is_here = device == self._device or device.type == self._device.type
            size = allocated_bytes(storage) if is_here and not is_on_host(storage) else 0
            if op is None and self.makes_unseen:
                number = self._builder.add_unseen_storage(size)
                self._add(storage, number, (FREE, number))
                return number
            number = self._builder.add_storage(size, kind, op=op, output=output, fixed=fixed)
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

    def adopt(self, number: int) -> None:
        """A storage that came from nowhere turned out to be made in the step: its death is an event."""
        self._adopted.add(number)

    def take_as_inputs(self) -> list[int]:
        """The storages that came from nowhere, and were there before the step: inputs of it from now on.

        What the step writes is none: DDP's buckets, which count as gradients. Nor is a number that Python made a
        tensor of.
        """
        found = [
            s.id
            for s in self._builder.storages
            if s.op is None and s.kind == "other" and not s.fixed and s.bytes > _NUMBER_BYTES
        ]
        found = [number for number in found if number not in self._adopted]
        for number in found:
            self._builder.storages[number] = replace(self._builder.storages[number], kind="input")
        return found

    def note_free(self, number: int) -> None:
        """Python holds the storage no more; a tape, which does, is no part of the step."""
        if number not in self._freed:
            self._freed.add(number)
            self._builder.add_event(FREE, number)

    def _add(self, storage: torch.UntypedStorage, number: int, death: tuple[int, int] | None) -> None:
        """``storage`` has the id ``number`` until it dies, which is the event ``death``."""
        entry = _Entry(storage, _died)
        entry.live, entry.key, entry.number, entry.death = self, storage._cdata, number, death
        self._ids[entry.key], self._entries[entry.key] = number, entry

    def note_death(self, entry: "_Entry") -> None:
        self._ids.pop(entry.key, None)
        self._entries.pop(entry.key, None)
        number = entry.number
        event = (FREE, number) if number in self._adopted else entry.death
        if event is not None and number not in self._freed:
            self._builder.add_event(*event)

    def stop(self) -> None:
        """Deaths count no more."""
        self._entries.clear()


class _Entry(weakref.ref[torch.UntypedStorage]):
    """A storage, weakly."""

    __slots__ = ("death", "key", "live", "number")

    death: tuple[int, int] | None
    key: int
    live: LiveStorages
    number: int


@never_compiled
def _died(entry: _Entry) -> None:
    entry.live.note_death(entry)
