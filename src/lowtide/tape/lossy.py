"""Storages kept inexactly: packed in the same memory, by the stream that computes. See ``graph/lossy.py``."""

from __future__ import annotations

import torch

from lowtide.errors import TierError
from lowtide.packing import Packed, dtype_of, pack, relative_error, unpack
from lowtide.tape.tiers import bytes_of, unseen


class NotFiniteError(TierError):
    """A storage holds what has no scale: it is kept as it is."""


class LossyTier:
    """Packs storages as ``form``.

    Raises:
        TierError: this torch has no dtype for it.
    """

    def __init__(self, form: str) -> None:
        dtype_of(form)
        self.form = form

    def store(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> LossyTicket:
        """Pack ``storage``, floats of ``dtype``. Raises: NotFiniteError: not all of them are finite."""
        with unseen():
            packed = pack(bytes_of(storage).view(dtype), self.form)
        if packed is None:
            raise NotFiniteError("infinite numbers, or none at all, cannot be packed.")
        return LossyTicket(packed, dtype)


class LossyTicket:
    """One storage, packed. See ``Ticket``."""

    def __init__(self, packed: Packed, dtype: torch.dtype) -> None:
        self._packed, self._dtype = packed, dtype
        self._buffer: torch.Tensor | None = None

    def settle(self) -> None:
        """It is whole already."""

    def start(self) -> None:
        if self._buffer is None:
            packed = self._packed.bytes
            with unseen():
                self._buffer = unpack(
                    self._packed, torch.empty(packed.numel(), dtype=self._dtype, device=packed.device)
                )

    def fetch(self) -> torch.Tensor:
        self.start()
        assert self._buffer is not None
        buffer, self._buffer = self._buffer, None
        return buffer.view(torch.uint8)

    def error_of(self, storage: torch.UntypedStorage) -> float:
        """How far what comes back is from ``storage``, relative to its norm."""
        with unseen():
            return relative_error(self._packed, bytes_of(storage).view(self._dtype))
