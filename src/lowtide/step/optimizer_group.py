"""Several optimizers of one model as one: Muon beside AdamW, or one a parameter, which step in backward."""

from collections.abc import Iterable
from typing import Any


class OptimizerGroup:
    """What all of them keep. Made anew whenever one is asked for: state and groups are those of the moment."""

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self.optimizers = tuple(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {p: kept for optimizer in self.optimizers for p, kept in optimizer.state.items()}
