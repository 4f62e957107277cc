"""Autocast regions around what lowtide runs, and inside kernels that run operators themselves."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import get_autocast_dtype, is_autocast_enabled, set_autocast_dtype, set_autocast_enabled

from lowtide.device.names import autocast_types


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Inside, backward runs as loops are written: the region has ended, and the casts that it kept are gone.

    It asks PyTorch itself: in a trace without memory ``torch.is_autocast_enabled`` says of CUDA what holds for the CPU.
    """
    entered = [device for device in autocast_types() if is_autocast_enabled(device)]
    if not entered:
        yield
        return
    torch.clear_autocast_cache()
    try:
        for device in entered:
            set_autocast_enabled(device, False)
        yield
    finally:
        for device in entered:
            set_autocast_enabled(device, True)


def casting_inside() -> AbstractContextManager[None] | None:
    """In a dispatch mode: what an operator has to run in whose kernel runs others, so that autocast casts for those.

    PyTorch excludes all that is above a mode while its handler runs, autocast included. A kernel in Python (of
    bitsandbytes, say) would multiply in float32 what it multiplies in bfloat16 without the mode.

    Returns:
        None where nothing is to be done: autocast is off, or off for what an operator of its own runs.
    """
    with torch._C._RestorePythonTLSSnapshot():  # as it was when the mode was entered
        entered = [device for device in autocast_types() if is_autocast_enabled(device)]
    hidden = [device for device in entered if not is_autocast_enabled(device)]
    return _enabled(hidden) if hidden else None


@contextmanager
def _enabled(devices: list[str]) -> Iterator[None]:
    try:
        for device in devices:
            set_autocast_enabled(device, True)
        yield
    finally:
        for device in devices:
            set_autocast_enabled(device, False)


class AutocastState:
    """Autocast as it is now, and a generator's state, for an operator whose kernel runs others to run again.

    Attributes:
        key: Equal for equal states of autocast.
    """

    __slots__ = ("_rng", "key")

    def __init__(self, rng: Any = None) -> None:
        """``rng``: a state with ``restored``; None: it draws nothing."""
        self.key = tuple((d, get_autocast_dtype(d)) for d in autocast_types() if is_autocast_enabled(d))
        self._rng = rng

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, both are as they were."""
        devices = [device for device, _ in self.key]
        before = [(device, get_autocast_dtype(device)) for device in devices]
        keeps_casts = torch.is_autocast_cache_enabled()
        off = [device for device in devices if not is_autocast_enabled(device)]
        with _enabled(off), nullcontext() if self._rng is None else self._rng.restored():
            try:
                torch.set_autocast_cache_enabled(False)  # a cast that is kept would be of a graph that nobody asked for
                for device, dtype in self.key:
                    set_autocast_dtype(device, dtype)
                yield
            finally:
                for device, dtype in before:
                    set_autocast_dtype(device, dtype)
                torch.set_autocast_cache_enabled(keeps_casts)


def with_autocast(rng: Any) -> Any:
    """``rng``, with autocast as it is now where that is on; see ``AutocastState``."""
    return AutocastState(rng) if torch._C._is_any_autocast_enabled() else rng
