"""Optimizers that a program makes, for whoever has to know which of them trains a module and is given none."""

import functools
import weakref
from typing import Any

import torch
from torch import nn


class MadeOptimizers:
    """Those made from here on to ``stop``, as long as they live."""

    def __init__(self) -> None:
        self._made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._make = make = torch.optim.Optimizer.__init__
        made_now: Any = self._made

        @functools.wraps(make)
        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            made_now.add(optimizer)

        self._wrapper = torch.optim.Optimizer.__init__ = made

    def __bool__(self) -> bool:
        return bool(self._made)

    def stop(self) -> None:
        if torch.optim.Optimizer.__init__ is self._wrapper:
            torch.optim.Optimizer.__init__ = self._make

    def of(self, module: nn.Module) -> list[torch.optim.Optimizer]:
        """Those that hold some of its parameters, the one with most of them first."""
        own = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        if not own:
            return []
        shares = [(len(own & held_by(optimizer)), optimizer) for optimizer in self._made]
        return [optimizer for share, optimizer in sorted(shares, key=lambda pair: -pair[0]) if share]


def held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Ids of its parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
