"""The part of PyTorch's state that decides a layer's code and bits, as it was when the layer was called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ambient:
    """What Dynamo guards on besides the inputs. A plan may be made in a place where all of it is different."""

    autocast: bool
    autocast_dtype: torch.dtype
    deterministic: bool
    deterministic_warns: bool
    matmul_precision: str
    threads: int

    @staticmethod
    def now() -> Ambient:
        """Of this thread, on a CPU."""
        return Ambient(
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
            torch.get_num_threads(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """With it, and with gradients: only a layer that needs them has variants."""
        before = Ambient.now()
        self._set_process_wide(before)
        try:
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.autocast("cpu", enabled=self.autocast, dtype=self.autocast_dtype),
            ):
                yield
        finally:
            before._set_process_wide(self)

    def _set_process_wide(self, before: Ambient) -> None:
        if (self.deterministic, self.deterministic_warns) != (before.deterministic, before.deterministic_warns):
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warns)
        if self.matmul_precision != before.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)
        if self.threads != before.threads:
            torch.set_num_threads(self.threads)
