"""Counts of what a tape did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counts:
    """What the tape did, over all steps.

    Attributes:
        steps: Forward passes taped.
        dropped: Tensors replaced by recipes.
        moved: Tensors moved to another tier.
        mismatched: Planned ops that did not run, ran in another form, or could not be dropped: saved instead.
        unplanned: Ops that are not in the plan (of a loss outside the model, for example): saved.
    """

    steps: int = 0
    dropped: int = 0
    moved: int = 0
    mismatched: int = 0
    unplanned: int = 0
