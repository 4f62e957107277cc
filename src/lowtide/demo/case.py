"""What a demo case is: a model, the step it trains with, and its batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Case:
    """One model and its training.

    Attributes:
        facts: One line: model, objective, precision.
        step: ``step(model, batch)`` returns the loss; nothing else outlives it.
        batch: The batch of the table.
        budgets: Of the table, as fractions of the plain step's activation memory.
        training: Batches of the training run, in order, taken again from the start when they run out.
    """

    name: str
    facts: str
    model: nn.Module
    step: Callable[[nn.Module, Any], torch.Tensor]
    batch: dict[str, torch.Tensor]
    training: tuple[dict[str, torch.Tensor], ...]
    training_steps: int
    learning_rate: float
    budgets: tuple[str, ...]
    training_budget: str

    @property
    def parameters(self) -> int:
        """How many, shared ones once."""
        return sum(p.numel() for p in self.model.parameters())


def shape_of(batch: dict[str, torch.Tensor]) -> tuple[int, ...]:
    """Rows and padded length of a batch."""
    return tuple(batch["input_ids"].shape)
