"""Tiers hold offloaded storages. ``disk_tier.py`` and ``host_tier.py`` implement the two there are.

A tier moves bytes and knows nothing of plans; ``offloaded_tensor.py`` says when. Stores run one after the other, and so
do fetches, both in parallel with the computation.
"""

from collections.abc import Mapping
from typing import Protocol

import torch


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
