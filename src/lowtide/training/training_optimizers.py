"""The optimizers that train a model: those that ``fit`` was given, and whichever step parameters of it.

What an optimizer keeps is known after its first step (``optimizer_steps.py``), also where nobody has passed it.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide.step import optimizer_steps
from lowtide.step.optimizer_group import OptimizerGroup
from lowtide.step.optimizer_state import checked_optimizer


class TrainingOptimizers:
    """``given``: as ``fit`` takes it. A name holds until an optimizer has stepped."""

    def __init__(self, model: nn.Module, given: Any) -> None:
        self._given = checked_optimizer(given)
        self._model = weakref.ref(model)
        self._stepped: list[weakref.ref[Any]] = []
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()  # of others too, which step none of its parameters

    @property
    def are_unknown(self) -> bool:
        """Nobody has passed one, and none has stepped."""
        return self._given is None and not self._stepped

    @property
    def num_stepped(self) -> int:
        """How many different ones have stepped so far."""
        return len(self._stepped)

    def all(self) -> Any:
        """What ``optimizer_bytes`` and its like take: one optimizer, several, a name, or None."""
        found = [optimizer for reference in self._stepped if (optimizer := reference()) is not None]
        if not found or self._given is None or isinstance(self._given, str):
            return self._given if not found else found[0] if len(found) == 1 else OptimizerGroup(found)
        given = self._given.optimizers if isinstance(self._given, OptimizerGroup) else (self._given,)
        others = [optimizer for optimizer in found if not any(optimizer is g for g in given)]
        return OptimizerGroup((*given, *others)) if others else self._given

    def observe(self) -> Callable[[], None]:
        """Note optimizers as they step; returns what ends that."""
        return optimizer_steps.observe(self._note)

    def _note(self, optimizer: Any) -> None:
        if optimizer in self._known:
            return
        self._known.add(optimizer)
        model = self._model()
        own = set() if model is None else {id(p) for p in model.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._stepped.append(weakref.ref(optimizer))
