"""The bytes of a storage, to compare and to sum."""

from typing import Any

import torch
from torch import Tensor

from lowtide.device.dispatch import bytes_of
from lowtide.tracing.operators import fingerprint

Seal = int | tuple[int, ...]  # a sum of words, or in rehearsals a fingerprint, which shows swaps of words too


def words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of a tensor's storage, eight at a time, and the rest: the cheapest form to compare and to sum."""
    raw = bytes_of(tensor.untyped_storage())
    whole = raw.numel() // 8 * 8
    return raw[:whole].view(torch.int64), raw[whole:]


def sum_of_words(tensor: Tensor) -> int:
    """Shows a later write to the storage: any change of one word changes it, a swap of two words does not."""
    whole, rest = words(tensor)
    return int(whole.sum()) + int(rest.sum())


def has_seal(tensor: Tensor, seal: Seal) -> bool:
    """Whether the storage of ``tensor`` has the bits that were sealed."""
    return (sum_of_words(tensor) if isinstance(seal, int) else fingerprint(tensor)) == seal


def same_storage_bits(a: Any, b: Tensor) -> bool:
    """Whether the storages of two tensors hold the same bytes."""
    if not isinstance(a, Tensor) or a.untyped_storage().nbytes() != b.untyped_storage().nbytes():
        return False
    return all(map(torch.equal, words(a), words(b)))
