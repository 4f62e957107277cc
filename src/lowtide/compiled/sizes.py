"""What the symbols of a graph are in one call: a graph that serves many lengths has symbols where others have sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lowtide.errors import UnsupportedModelError


@dataclass(frozen=True)
class Sizes:
    """The symbols of a graph, and their numbers in one call; without symbols every size is a number already."""

    symbols: tuple[Any, ...] = ()
    numbers: tuple[int, ...] = ()

    def of(self, size: int | torch.SymInt) -> int:
        """The number that a size is.

        Raises:
            UnsupportedModelError: it depends on values.
        """
        if not isinstance(size, torch.SymInt):
            return int(size)
        found = self._filled(size.node.expr)
        if not found.is_Integer:
            raise UnsupportedModelError(
                f"a compiled layer has a size that depends on values ({found}), so no plan knows its bytes. Name other "
                "layers with layers=, or use lowtide.fit."
            )
        return int(found)

    def bytes_of(self, value: object) -> int:
        """Of a graph's value; 0 where it is no tensor."""
        return self.of(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0

    def meet(self, condition: Any) -> bool:
        """Whether they are among the sizes that a compiler's condition allows."""
        import sympy

        return self._filled(condition) is sympy.S.true

    def _filled(self, expression: Any) -> Any:
        import sympy

        return expression.xreplace(dict(zip(self.symbols, map(sympy.Integer, self.numbers), strict=True)))


FIXED = Sizes()
