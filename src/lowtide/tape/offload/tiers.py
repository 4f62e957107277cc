"""Tiers hold offloaded storages. ``disk_tier.py`` and ``host_tier.py`` implement the two there are.

A tier moves bytes and knows nothing of plans; ``offloaded_tensor.py`` says when. Stores run one after the other, and so
do fetches, both in parallel with the computation.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch._C import DispatchKey


class StoredCopy(Protocol):
    """One copy on a tier. Its space there is free again when this object dies."""

    def settle(self) -> None:
        """Wait until the copy is complete, and release the original. Raises: TierError: it could not be made."""

    def start_fetch(self) -> None:
        """Allocate memory and start the fetch, unless it has started."""

    def fetch(self) -> torch.Tensor:
        """The bytes of the storage, flat, in memory of their own. Waits. Raises: TierError: they cannot be read."""


class Tier(Protocol):
    """A place for offloaded storages."""

    def store(self, storage: torch.UntypedStorage) -> StoredCopy:
        """Start to copy ``storage``, which lives until the copy has settled. Raises: TierError: there is no room."""


Tiers = Mapping[str, Tier]  # by name: ``host``, ``disk``


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as a flat tensor of bytes."""
    with hidden_from_modes():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def hidden_from_modes() -> Iterator[None]:
    """Hide what runs inside from dispatch modes: a tier's own work is not part of the step."""
    before = torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.Python)
    torch._C._dispatch_tls_set_dispatch_key_excluded(DispatchKey.Python, True)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(DispatchKey.Python, before)
