"""Tiers: where moved storages are meanwhile. ``disk_tier.py`` and ``host_tier.py`` are the two there are.

    Tier     takes a copy of a storage and gives a Ticket for it.
    Ticket   one copy: settle it (the original may go), start to fetch it, have it, let it go.

A tier moves bytes and knows nothing of plans; when what happens is ``offloaded_tensor.py``'s to say. Copies go out one
after the other, and come back one after the other, beside the computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch._C import DispatchKey

if TYPE_CHECKING:
    from collections.abc import Iterator


class Ticket(Protocol):
    """One copy. Its place in the tier is free again when nobody holds the ticket any more."""

    def settle(self) -> None:
        """Wait until the copy is whole, and let the original go.

        Raises:
            TierError: the copy could not be made.
        """

    def start_fetch(self) -> None:
        """Make room and start to fetch, unless that has been done."""

    def fetch(self) -> torch.Tensor:
        """The bytes of the storage, as a flat tensor of bytes in memory of its own; waits for them.

        Raises:
            TierError: they cannot be had.
        """


class Tier(Protocol):
    """A place to move storages to."""

    def store(self, storage: torch.UntypedStorage) -> Ticket:
        """Start to copy ``storage``, which lives until the copy has settled.

        Raises:
            TierError: there is no room, or an earlier copy failed.
        """


Tiers = Mapping[str, Tier]  # by name: ``host``, ``disk``


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as a flat tensor of bytes."""
    with hidden_from_modes():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def hidden_from_modes() -> Iterator[None]:
    """What runs inside no dispatch mode sees: a tier's own work is no part of the step."""
    before = torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.Python)
    torch._C._dispatch_tls_set_dispatch_key_excluded(DispatchKey.Python, True)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(DispatchKey.Python, before)
