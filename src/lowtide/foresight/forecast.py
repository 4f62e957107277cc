"""What is expected of one setup: plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from lowtide.foresight.device_peak import FITS, Amount
from lowtide.foresight.training_setup import TrainingSetup
from lowtide.plan import Plan


@dataclass(frozen=True)
class Stage:
    """One rank of a stage of a pipeline.

    Attributes:
        layers: First and last.
        micro_batches: Whose activations it holds at most.
    """

    layers: tuple[int, int]
    micro_batches: int
    peak_bytes: Amount
    verdict: str


@dataclass(frozen=True)
class Forecast:
    """What is expected of one setup.

    Attributes:
        verdict: ``FITS``, ``UNCERTAIN`` or ``DOES_NOT_FIT``.
        by_part: Bytes that make up ``peak_bytes.expected``.
        step_ms: Of one optimizer's step; None where nothing was traced.
        plan: None where nothing was traced, or no plan is small enough.
        by_module: Bytes of parameters and of what backward needs, milliseconds; numbered siblings together.
        traced: False where what is resident alone is too much, so nothing had to be traced.
        stages: Of a pipeline, first to last; all else is of the one that holds most.
        allocated_bytes: Of ``peak_bytes.expected`` what the device's allocator counts as allocated.
    """

    setup: TrainingSetup
    verdict: str
    peak_bytes: Amount
    by_part: dict[str, int]
    host_bytes: int
    step_ms: Amount | None
    tokens_per_second: float | None
    plan: Plan | None
    assumptions: list[str]
    by_module: dict[str, dict[str, float]] = field(default_factory=dict)
    traced: bool = True
    stages: tuple[Stage, ...] = ()
    allocated_bytes: int = 0
    ask_reserved: Callable[[], int | None] = field(default=lambda: None, repr=False, compare=False)

    @cached_property
    def reserved_bytes(self) -> int | None:
        """What the device's allocator reserves at most; simulated when first asked for.

        None where nothing was traced, no plan fits, or the allocator is not modelled.
        """
        return self.ask_reserved()

    @property
    def fits(self) -> bool:
        return self.verdict == FITS
