"""Autocast regions around what lowtide runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import is_autocast_enabled, set_autocast_enabled

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
