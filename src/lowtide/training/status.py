"""What really ran: of the steps that went by, which ran under a plan, within which memory, and why others did not."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from lowtide.reports.notebook import card
from lowtide.units import format_bytes

WATCHED = "the last step was watched, to plan the next"  # a reason to have no plan
_TOLD_SHARE = 0.01  # of the budget: the sentence speaks of steps that took so much more


@dataclass
class Counters:
    """What went by."""

    steps: int = 0
    planned_steps: int = 0
    calls: int = 0
    planned_calls: int = 0
    observed_peak_bytes: int | None = None
    last_peak_bytes: int | None = None
    uncounted_steps: int = 0  # whose peak nobody counts
    over_budget_steps: int = 0
    excess_bytes: int = 0  # of the worst of them
    plan_left_steps: int = 0
    why_not_planned: str = "no step has been seen yet"  # the last step; "": it was


@dataclass(frozen=True)
class Status:
    """Counted from real steps. A step is a forward pass with the backward that follows.

    Attributes:
        in_force: The last step ran under a plan, all its calls of the model, and the fit has not been removed.
        why_not: Why no plan is in force, "" where one is.
        steps, planned_steps: Seen in all, and of these under a plan.
        calls, planned_calls: Calls of the model with gradients, likewise.
        observed_peak_bytes: Highest peak seen, resident memory included; None where it cannot be measured. Where the
            counter is missing on a CPU (no compiler, a profiler is active), it is that of steps without a plan.
        last_peak_bytes: Of the last step, as the allocator counts it; None where nobody does.
        highest_peak_bytes: ``observed_peak_bytes`` where each step's peak is known; else None.
        over_budget_steps: Steps whose peak was above the budget.
        excess_bytes: How far the worst of them was above it.
        plan_left_steps: Steps that ran other ops than their plan, and went on without it.
        budget_bytes: What the step may take; None as long as a percentage waits for the first step.
        shapes, plans: Shapes seen, and plans at hand.
        planning_s: Seconds of planning: of ``fit`` all beside training, of ``compile`` between two steps.
        opaque_calls: The share of the stored bytes that calls made which are one op, and which of them run again; ""
            where there are none.
        reasons: What you should know, one line each: what runs without a plan or is saved whole, and why.
    """

    in_force: bool
    why_not: str
    steps: int
    planned_steps: int
    calls: int
    planned_calls: int
    observed_peak_bytes: int | None
    budget_bytes: int | None
    shapes: int
    plans: int
    planning_s: float
    reasons: tuple[str, ...] = ()
    opaque_calls: str = ""
    last_peak_bytes: int | None = None
    highest_peak_bytes: int | None = None
    over_budget_steps: int = 0
    excess_bytes: int = 0
    plan_left_steps: int = 0

    @staticmethod
    def of(
        counters: Counters, *, why_not: str, budget_bytes: int | None, shapes: int, plans: int, planning_s: float,
        reasons: Iterable[str], opaque_calls: str = "",
    ) -> "Status":  # fmt: skip
        """What ``counters`` have seen."""
        return Status(
            in_force=not why_not,
            why_not=why_not,
            steps=counters.steps,
            planned_steps=counters.planned_steps,
            calls=counters.calls,
            planned_calls=counters.planned_calls,
            observed_peak_bytes=counters.observed_peak_bytes,
            budget_bytes=budget_bytes,
            shapes=shapes,
            plans=plans,
            planning_s=planning_s,
            reasons=tuple(reasons),
            opaque_calls=opaque_calls,
            last_peak_bytes=counters.last_peak_bytes,
            highest_peak_bytes=None if counters.uncounted_steps else counters.observed_peak_bytes,
            over_budget_steps=counters.over_budget_steps,
            excess_bytes=counters.excess_bytes,
            plan_left_steps=counters.plan_left_steps,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "reasons": list(self.reasons)}

    def _repr_html_(self) -> str:
        amounts = (self.observed_peak_bytes, self.budget_bytes)
        peak, budget = ("not known" if count is None else format_bytes(count) for count in amounts)
        shapes = f"{self.shapes} input shape{'s' * (self.shapes != 1)}"
        calls = f"{self.planned_calls} of {self.calls} calls"
        of_what = "steps without a plan" if self._is_of_some_steps else "weights and gradients included"
        tiles = [
            (f"{self.planned_steps} of {self.steps}", "steps under a plan", calls),
            (peak, "observed peak", of_what),
            (budget, "budget", "peak allocated, absolute"),
            (str(self.plans), "plans", f"for {shapes}; {self.planning_s:.1f} s of planning"),
        ]
        title = "The plan is in force" if self.in_force else f"Not in force: {self.why_not}"
        return card(title, tiles, notes=[line for line in (self.opaque_calls, *self.reasons) if line])

    @property
    def _is_of_some_steps(self) -> bool:
        """Nobody has counted what others took."""
        return self.observed_peak_bytes is not None and self.highest_peak_bytes is None

    def __str__(self) -> str:
        opaque = f"{self.opaque_calls[:1].upper()}{self.opaque_calls[1:]}"
        return " ".join([self.headline, *(f"{line.removesuffix('.')}." for line in (opaque, *self.reasons) if line)])

    @property
    def headline(self) -> str:
        """All but the reasons."""
        if not self.steps:
            text = "No step has been seen yet"
            text += f": {self.calls} calls of the model, and no backward." if self.calls else "."
        elif self.in_force:
            text = f"The plan is in force: {self.planned_steps} of {self.steps} steps ran under a plan."
        else:
            text = f"NOT IN FORCE: {self.why_not}. {self.planned_steps} of {self.steps} steps ran under a plan."
        if self.steps:
            text += f" Of {self.calls} calls of the model {self.planned_calls} were planned."
        budget = "not known yet" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        peak = "not measured" if self.observed_peak_bytes is None else format_bytes(self.observed_peak_bytes)
        if self._is_of_some_steps:
            peak += " in steps without a plan"
        if self.last_peak_bytes is not None:
            peak += f", last step {format_bytes(self.last_peak_bytes)}"
        text += f" Observed peak: {peak}; budget: {budget}."
        if self.budget_bytes and self.excess_bytes > _TOLD_SHARE * self.budget_bytes:
            steps = f"{self.over_budget_steps} step{'s' * (self.over_budget_steps > 1)}"
            text += f" {steps} took more than the budget, by {format_bytes(self.excess_bytes)} at most."
        return f"{text} Shapes: {self.shapes}, plans: {self.plans}; planning took {self.planning_s:.1f} s."
