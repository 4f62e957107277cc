"""What autograd holds in place of the tensors that it stores, while a step is recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide.graph.step_graph import RELEASE
from lowtide.tracing.module_calls import never_compiled

if TYPE_CHECKING:
    from lowtide.tracing.recorder import Recorder


class SavedPlaceholder:
    """What autograd holds in place of a saved tensor while tracing."""

    __slots__ = ("copy", "device", "dtype", "elements", "recorder", "saved", "size", "stride")

    def __init__(self, recorder: Recorder, saved: int, tensor: torch.Tensor, *, exact: bool) -> None:
        self.recorder, self.saved = recorder, saved
        self.copy = tensor.detach().clone() if exact else None
        self.size, self.stride, self.dtype, self.device = tensor.size(), tensor.stride(), tensor.dtype, tensor.device
        self.elements = 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True) if n)

    def blank(self) -> torch.Tensor:
        return torch.zeros(self.elements, dtype=self.dtype, device=self.device).as_strided(self.size, self.stride)

    @never_compiled
    def __del__(self) -> None:
        self.recorder.event(RELEASE, self.saved)


class HeldTensor:
    """A saved tensor that the plain step holds and the tracer may as well: it was there before the step."""

    __slots__ = ("recorder", "saved", "tensor")

    def __init__(self, recorder: Recorder, saved: int, tensor: torch.Tensor) -> None:
        self.recorder, self.saved, self.tensor = recorder, saved, tensor

    @never_compiled
    def __del__(self) -> None:
        self.recorder.event(RELEASE, self.saved)
