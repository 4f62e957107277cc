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
        module: Path of the module call that runs: storages that are added now are its own.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.module = ""
        self._known: dict[int, weakref.ref] = {}  # by the storage's address: an entry goes with its storage
        self._modules: dict[int, str] = {}  # likewise
        self._sizes: dict[int, int] = {}

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._known

    def storages(self) -> list[torch.UntypedStorage]:
        """Those that live."""
        return [storage for reference in list(self._known.values()) if (storage := reference()) is not None]

    def by_module(self) -> dict[str, int]:
        """Bytes that live, by the module that made them; "" is what backward made, or code outside modules."""
        found: dict[str, int] = {}
        for key, reference in list(self._known.items()):
            storage = reference()
            if storage is not None:
                module = self._modules.get(key, "")
                found[module] = found.get(module, 0) + allocated_bytes(storage)
        return found

    def add(self, storage: torch.UntypedStorage, size: int | None = None) -> int:
        """Count ``storage`` until it dies; its bytes, which are those that it has now unless ``size`` says more."""
        size, key = allocated_bytes(storage) if size is None else size, storage._cdata

        @never_compiled
        def died(reference: Any) -> None:
            if self._known.get(key) is reference:
                del self._known[key], self._modules[key]
                self.now -= self._sizes.pop(key)

        self._known[key], self._sizes[key] = weakref.ref(storage, died), size
        self._modules[key] = self.module
        self.now += size
        self.peak = max(self.peak, self.now)
        return size

    def forget(self, storage: torch.UntypedStorage) -> None:
        """``storage`` lives on and has no memory any more."""
        if storage in self:
            del self._known[storage._cdata], self._modules[storage._cdata]
            self.now -= self._sizes.pop(storage._cdata)

    def restart(self, unseen_bytes: int = 0) -> None:
        """Count anew: what was added belongs to an earlier step. ``unseen_bytes`` live already, and to the end."""
        self._known.clear()
        self._modules.clear()
        self._sizes.clear()
        self.now = self.peak = unseen_bytes
