"""A store for one rank of many: what the others would have written is made up, or refused by name."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Under these PyTorch's NCCL group keeps the unique id that one rank makes and the others read: a number (of
# communicators that were made), a device, or "split:..." below the group's prefixes.
_UNIQUE_ID_BYTES = 128


class LoneStore(dist.Store):
    """Answers at once: a count of ranks that reached a barrier is full as soon as this one has.

    Args:
        world_size: How many ranks there would be.
        before_communicator: Called with the key under which the id of a communicator is kept, before it is made.
    """

    def __init__(self, world_size: int, before_communicator: Callable[[str], object] = lambda key: None) -> None:
        super().__init__()
        self._world_size = world_size
        self._before_communicator = before_communicator
        self._kept: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        if len(value) == _UNIQUE_ID_BYTES and self._is_unique_id(key):
            self._before_communicator(key)
        self._kept[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        if self._is_unique_id(key):
            self._before_communicator(key)
        if key not in self._kept:
            if not self._is_unique_id(key):
                raise RuntimeError(self._missing(key))
            self._kept[key] = b"lone-rank".ljust(_UNIQUE_ID_BYTES, b"\0")
        return self._kept[key]

    def add(self, key: str, amount: int) -> int:
        each = amount * (self._world_size if "barrier" in key else 1)
        total = int(self._kept.get(key, b"0")) + each
        self._kept[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self._kept.get(key, b"").decode(errors="replace") == expected:
            self.set(key, desired)
        return self._kept.get(key, str(expected).encode())

    def check(self, keys: list[str]) -> bool:
        return all(key in self._kept for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            if key not in self._kept and not self._is_unique_id(key) and "barrier" not in key:
                raise RuntimeError(self._missing(key))

    def delete_key(self, key: str) -> bool:
        return self._kept.pop(key, None) is not None

    deleteKey = delete_key

    def num_keys(self) -> int:
        return len(self._kept)

    getNumKeys = num_keys

    def list_keys(self) -> list[str]:
        return list(self._kept)

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing is waited for."""

    def clone(self) -> "LoneStore":
        return self  # whoever keeps a clone, keeps what was written

    # What PyTorch asks of a store with an extended interface.
    def append(self, key: str, value: Any) -> None:
        self._kept[key] = self._kept.get(key, b"") + bytes(value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def _is_unique_id(self, key: str) -> bool:
        return "cuda" in key or key.rsplit("/", 1)[-1].partition(":")[0].isdigit()

    def _missing(self, key: str) -> str:
        return (
            f"the store has no {key!r}: another of the {self._world_size} ranks would have written it, and only one "
            "exists.\n"
            "Leave out what exchanges values through the store, or start real processes."
        )
