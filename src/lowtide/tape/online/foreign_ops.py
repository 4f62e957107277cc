"""Operators of other libraries (bitsandbytes, say) in an online step: looked at once before one is let go.

A schema may be wrong: a kernel of somebody's own may write what it is given, or draw random numbers, and say nothing.
So what the first call of each kind was given is compared before and after. What those make that write or draw is saved.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.device.generators import GeneratorStates
from lowtide.device.numeric_flags import numeric_flags
from lowtide.step.kinds_of_calls import Kind, KnownKinds, layout_of, values_of
from lowtide.step.operators import COMMUNICATES, fingerprint

_NOT_OF_OTHERS = frozenset({*COMMUNICATES, "_c10d_functional_autograd", "_dtensor", "symm_mem"})
_COMMUNICATES = "is no operator that PyTorch computes with"
_WRITES = "writes in place without saying so"
_DRAWS = "draws random numbers without saying so"
_GIVEN = "is given an object, which may change before backward"


class ForeignOp:
    """One call that is about to be made.

    Attributes:
        is_watched: No call of its kind has been looked at, or they write what they are given.
    """

    __slots__ = ("_before", "_generators", "_kind", "_kinds", "_tensors", "_why", "is_watched")

    def __init__(self, kinds: KnownKinds, func: Any, args: tuple, kwargs: dict, tensors: list[torch.Tensor]) -> None:
        self._kinds, self._tensors = kinds, tensors
        if func.namespace in _NOT_OF_OTHERS or any("__torch__" in str(a.type) for a in func._schema.arguments):
            self._why: str | None = _COMMUNICATES if func.namespace in _NOT_OF_OTHERS else _GIVEN
            self.is_watched = False
            return
        self._kind = Kind((func, numeric_flags(), layout_of((args, kwargs))), values_of((args, kwargs)))
        self._why = kinds.verdict(self._kind)
        self.is_watched = self._why in (None, _WRITES)
        if self.is_watched:
            with _disable_current_modes():
                self._before = [fingerprint(t) for t in tensors]
                self._generators = GeneratorStates(tensors)

    def why_kept(self) -> tuple[str, list[torch.Tensor]]:
        """It has run: why what it made is saved, "" if it need not be; and what it has written unseen."""
        if not self.is_watched:
            return self._why or "", []
        with _disable_current_modes():
            written = [t for t, before in zip(self._tensors, self._before, strict=True) if fingerprint(t) != before]
            drew = self._generators.have_moved()
        why = self._why or (_WRITES if written else _DRAWS if drew else "")
        self._kinds.learn(self._kind, why)
        return why, written
