"""The part of PyTorch's state that decides a layer's code and bits, as it was when the layer was called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.device.numeric_flags import attention_flags, numeric_flags, with_attention_flags, with_numeric_flags


@dataclass(frozen=True)
class Ambient:
    """What Dynamo guards on besides the inputs, and which kernels of attention may run.

    A plan may be made in a place where all of it is different.
    """

    device_type: str
    autocast: bool
    autocast_dtype: torch.dtype
    flags: tuple[Any, ...]
    attention: tuple[bool, ...]

    @staticmethod
    def now(device_type: str) -> Ambient:
        """Of this thread."""
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        return Ambient(device_type, enabled, dtype, numeric_flags(), attention_flags())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """With it, and with gradients: only a layer that needs them has variants."""
        with (
            with_numeric_flags(self.flags),
            with_attention_flags(self.attention),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(self.device_type, enabled=self.autocast, dtype=self.autocast_dtype),
        ):
            yield
