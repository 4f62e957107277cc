"""Live bytes of a step, counted as ops run: where no allocator counts, this is how the tape knows what lives."""

import weakref
from typing import Any

import torch

from lowtide.tracing.module_calls import never_compiled
from lowtide.tracing.operators import allocated_bytes


class LiveBytes:
    """Bytes of the storages that were added and still live.

    Attributes:
        now, peak: Bytes; ``peak`` since ``restart``.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref] = {}  # by the storage's address: an entry goes with its storage

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._known

    def storages(self) -> list[torch.UntypedStorage]:
        """Those that live."""
        return [storage for reference in list(self._known.values()) if (storage := reference()) is not None]

    def add(self, storage: torch.UntypedStorage) -> int:
        """Count ``storage`` until it dies; its bytes."""
        size, key = allocated_bytes(storage), storage._cdata

        @never_compiled
        def died(reference: Any) -> None:
            if self._known.get(key) is reference:
                del self._known[key]
                self.now -= size

        self._known[key] = weakref.ref(storage, died)
        self.now += size
        self.peak = max(self.peak, self.now)
        return size

    def restart(self, unseen_bytes: int = 0) -> None:
        """Count anew: what was added belongs to an earlier step. ``unseen_bytes`` live already, and to the end."""
        self._known.clear()
        self.now = self.peak = unseen_bytes
