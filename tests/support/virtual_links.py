"""A tier whose transfers take exactly as long, on a virtual clock, as the bandwidth and latency of its link say."""

from __future__ import annotations

import torch

from lowtide.device.dispatch import bytes_of
from lowtide.graph.costs import Link


class Clock:
    """Virtual milliseconds: they pass only in ``compute`` and ``wait_until``."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def compute(self, ms: float) -> None:
        self.now_ms += ms

    def wait_until(self, ms: float) -> float:
        """Returns the milliseconds waited."""
        waited = max(0.0, ms - self.now_ms)
        self.now_ms += waited
        return waited


class VirtualTier:
    """A ``Tier`` over one link. ``transfers``: direction, bytes, start, end, wait of each, in the order of requests."""

    def __init__(self, clock: Clock, link: Link) -> None:
        self.clock, self.link = clock, link
        self.free_ms = {"store": 0.0, "fetch": 0.0}
        self.transfers: list[list] = []

    def store(self, storage: torch.UntypedStorage) -> VirtualCopy:
        return VirtualCopy(self, storage)

    def send(self, direction: str, size: int, ready_ms: float) -> list:
        start = max(self.clock.now_ms, self.free_ms[direction], ready_ms)
        took = self.link.store_ms(size) if direction == "store" else self.link.fetch_ms(size)
        self.free_ms[direction] = start + took
        self.transfers.append([direction, size, start, start + took, 0.0])
        return self.transfers[-1]


class VirtualCopy:
    """See ``StoredCopy``. The bytes are copied when the copy settles, so a write before that corrupts them."""

    def __init__(self, tier: VirtualTier, storage: torch.UntypedStorage) -> None:
        self.tier, self.size = tier, storage.nbytes()
        self.original: torch.UntypedStorage | None = storage
        self.out = tier.send("store", self.size, 0.0)
        self.back: list | None = None

    def settle(self) -> None:
        if self.original is not None:
            self.out[-1] += self.tier.clock.wait_until(self.out[3])
            self.copy = bytes_of(self.original).clone()
            self.original = None

    def start_fetch(self) -> None:
        if self.back is None:
            self.settle()
            self.back = self.tier.send("fetch", self.size, self.out[3])
            self.buffer = torch.empty(self.size, dtype=torch.uint8)

    def fetch(self) -> torch.Tensor:
        self.start_fetch()
        self.back[-1] += self.tier.clock.wait_until(self.back[3])
        self.back = None
        return self.__dict__.pop("buffer").copy_(self.copy)
