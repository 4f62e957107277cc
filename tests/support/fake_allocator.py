"""An accelerator's allocator that only counts. Tensors of the device "meta" are taken for its own."""

from types import SimpleNamespace

import pytest
import torch

from lowtide.device import memory
from lowtide.measurement import allocator


class FakeAllocator:
    """``now``, ``peak`` and ``reserved`` bytes, of an allocator that keeps what it has. ``tells``: it says so."""

    def __init__(self, capacity: int = 2**33) -> None:
        self.capacity = capacity
        self.now = self.peak = self.reserved = self.resets = 0
        self.tells = True

    def allocate(self, size: int) -> int:
        self.now += size
        self.peak = max(self.peak, self.now)
        self.reserved = max(self.reserved, self.now)
        return size

    def free(self, size: int) -> None:
        self.now -= size

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The device layer finds this allocator on "meta"."""

        def stats(index: int) -> dict[str, dict]:
            if not self.tells:
                raise RuntimeError("Allocator is not a DeviceAllocator")
            return {
                "allocated_bytes": {"all": {"current": self.now, "peak": self.peak}},
                "reserved_bytes": {"all": {"current": self.reserved}},
            }

        def info(index: int) -> tuple[int, int]:
            if not self.tells:
                raise NotImplementedError
            return self.capacity - self.reserved, self.capacity

        def forget(index: int) -> None:
            self.resets += 1
            self.peak = self.now

        for name, function in {
            "memory_allocated": lambda index: self.now,
            "max_memory_allocated": lambda index: self.peak,
            "memory_reserved": lambda index: self.reserved,
            "reset_peak_memory_stats": forget,
            "get_memory_info": info,
        }.items():
            monkeypatch.setattr(torch.accelerator, name, function)
        monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True)
        monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", stats)
        monkeypatch.setattr(memory, "index_of", lambda device: 0)
        monkeypatch.setattr(memory, "is_accelerator", lambda device: torch.device(device).type == "meta")
        monkeypatch.setattr(allocator, "is_accelerator", memory.is_accelerator)
        monkeypatch.setattr(memory, "_empty", self._empty)
        for noted in ("_forgotten", "_low"):
            monkeypatch.setattr(memory, noted, {})

    def _empty(self, size: int, device: torch.device) -> object:
        self.allocate(size)
        return _Piece(self, size)


class _Piece(SimpleNamespace):
    def __init__(self, allocator: FakeAllocator, size: int) -> None:
        super().__init__(allocator=allocator, size=size)

    def __del__(self) -> None:
        self.allocator.free(self.size)
