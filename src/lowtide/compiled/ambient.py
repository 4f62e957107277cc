"""The part of PyTorch's state that decides a layer's code and bits, as it was when the layer was called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.device.numeric_flags import numeric_flags, with_numeric_flags


@dataclass(frozen=True)
class Ambient:
    """What Dynamo guards on besides the inputs. A plan may be made in a place where all of it is different."""

    autocast: bool
    autocast_dtype: torch.dtype
    flags: tuple[Any, ...]

    @staticmethod
    def now() -> Ambient:
        """Of this thread, on a CPU."""
        return Ambient(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), numeric_flags())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """With it, and with gradients: only a layer that needs them has variants."""
        with (
            with_numeric_flags(self.flags),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=self.autocast, dtype=self.autocast_dtype),
        ):
            yield
