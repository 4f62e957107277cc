"""Autocast regions around what lowtide runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lowtide.device.names import autocast_types


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Inside, backward runs as loops are written: the region has ended, and the casts that it kept are gone."""
    entered = [device for device in autocast_types() if torch.is_autocast_enabled(device)]
    if not entered:
        yield
        return
    torch.clear_autocast_cache()
    try:
        for device in entered:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device in entered:
            torch.set_autocast_enabled(device, True)
