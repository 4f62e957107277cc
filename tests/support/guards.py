"""Shared by the tests of guards: the comparison with a plain step, an operator with a false schema."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint
from support.training_steps import (
    differing,
    harshest,
    plain,
    planned,
)
from support.unseen_memory import memory_of
from torch import library as registry
from torch import nn

IN_PLACE = "one of the variables needed for gradient computation has been modified by an inplace operation"


def wrong(model: nn.Module, batch: Any, step: Any = None) -> list[str]:
    """What differs from the plain step when everything is dropped."""
    return differing(plain(model, batch, step), planned(model, batch, harshest(model, batch, step), step))


_library = registry.Library("lowtide_tests", "DEF")
_library.define("counted(Tensor x, Tensor calls) -> Tensor")


def _counted(x: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
    memory_of(calls)[0] += 1
    return x.sin()


for _key in ("CPU", "CUDA"):
    _library.impl("counted", _counted, _key)


class FalseSchema(nn.Module):
    """Counts its calls in a buffer that the operator's schema says is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).sin()
        return self.linear(h * torch.ops.lowtide_tests.counted(h.detach(), self.calls))
