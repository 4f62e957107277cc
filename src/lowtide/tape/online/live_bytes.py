"""Live bytes of a step, counted as ops run: where no allocator counts, this is how the tape knows what lives."""

from __future__ import annotations

import weakref

import torch

from lowtide.step.module_calls import never_compiled
from lowtide.step.operators import allocated_bytes


class LiveBytes:
    """Bytes of the storages that were added and still live.

    Attributes:
        now, peak: Bytes; ``peak`` since ``restart``.
        module: Path of the module call that runs: storages that are added now are its own.
        of_backward: Bytes that ops of the last backward made, and that live.
    """

    def __init__(self) -> None:
        self.now = self.peak = self.of_backward = 0
        self._backward = 0  # its number
        self.module = ""
        self.entries: dict[int, Entry] = {}  # by the storage's address: an entry goes with its storage

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self.entries

    def storages(self) -> list[torch.UntypedStorage]:
        """Those that live."""
        return [storage for entry in list(self.entries.values()) if (storage := entry()) is not None]

    def by_module(self) -> dict[str, int]:
        """Bytes that live, by the module that made them; "" is what backward made, or code outside modules."""
        found: dict[str, int] = {}
        for entry in list(self.entries.values()):
            storage = entry()
            if storage is not None:
                found[entry.module] = found.get(entry.module, 0) + allocated_bytes(storage)
        return found

    def begin_backward(self) -> None:
        self._backward += 1
        self.of_backward = 0

    def add(self, storage: torch.UntypedStorage, size: int | None = None, *, in_backward: bool = False) -> int:
        """Count ``storage`` until it dies; its bytes, which are those that it has now unless ``size`` says more.

        Args:
            in_backward: An op of backward has made it.
        """
        entry = Entry(storage, _died)
        entry.live, entry.key, entry.module = self, storage._cdata, self.module
        entry.bytes = size = allocated_bytes(storage) if size is None else size
        entry.backward = self._backward if in_backward else 0
        if in_backward:
            self.of_backward += size
        self.entries[entry.key] = entry
        self.now = now = self.now + size
        if now > self.peak:
            self.peak = now
        return size

    def forget(self, storage: torch.UntypedStorage) -> None:
        """``storage`` lives on and has no memory any more."""
        if (entry := self.entries.pop(storage._cdata, None)) is not None:
            self.now -= entry.bytes

    def restart(self, unseen_bytes: int = 0) -> None:
        """Count anew: what was added belongs to an earlier step. ``unseen_bytes`` live already, and to the end."""
        self.entries.clear()
        self.now = self.peak = unseen_bytes


class Entry(weakref.ref[torch.UntypedStorage]):
    """A storage, weakly; its bytes, and the module that made it, or the number of the backward."""

    __slots__ = ("backward", "bytes", "key", "live", "module")

    backward: int
    bytes: int
    key: int
    live: LiveBytes
    module: str


@never_compiled
def _died(entry: Entry) -> None:
    live = entry.live
    if live.entries.get(entry.key) is entry:
        del live.entries[entry.key]
        live.now -= entry.bytes
        if entry.backward and entry.backward == live._backward:
            live.of_backward -= entry.bytes
