"""What steps without a plan take: no plan is put in force that is worse."""

from dataclasses import dataclass

from lowtide.shapes.call_shapes import CallShape
from lowtide.units import format_bytes

# Than steps without a plan. A plan's time is that of the ops of one step, which was the first of a process, mostly.
_CLEARLY_SLOWER = 2.0
_LEAST_TIMED = 2  # steps: one may be slow by chance


@dataclass
class Unplanned:
    """What steps of a shape took that ran without a plan.

    Attributes:
        peak_bytes: The highest.
        start_bytes: What was there before that step: an optimizer's state comes after the first one.
        step_ms: Of the fastest of ``num_timed``, by the clock.
    """

    peak_bytes: int = 0
    start_bytes: int = 0
    step_ms: float = float("inf")
    num_timed: int = 0

    @property
    def is_timed(self) -> bool:
        return self.num_timed >= _LEAST_TIMED

    def peak_from(self, start_bytes: int) -> int:
        """What such a step takes where so much is there before it, or less."""
        return self.peak_bytes + max(0, start_bytes - self.start_bytes)


class UnplannedSteps:
    """Of one model, by the shape of their first call, within the present budget."""

    def __init__(self) -> None:
        self.by_shape: dict[CallShape, Unplanned] = {}

    def note(self, shape: CallShape, peak_bytes: int, start_bytes: int, step_ms: float | None) -> None:
        """A step without a plan is over, that had to keep the present budget."""
        found = self.by_shape.setdefault(shape, Unplanned())
        if peak_bytes > found.peak_from(start_bytes):
            found.peak_bytes, found.start_bytes = peak_bytes, start_bytes
        if step_ms is not None:
            found.step_ms, found.num_timed = min(found.step_ms, step_ms), found.num_timed + 1

    def allowed_bytes(self, shape: CallShape, start_bytes: int, budget_bytes: int) -> int:
        """What a step under a plan may take that begins with so much: the budget, or what one without a plan takes."""
        unplanned = self.by_shape.get(shape)
        return max(budget_bytes, 0 if unplanned is None else unplanned.peak_from(start_bytes))

    def why_worse(
        self, shape: CallShape, peak_bytes: int, start_bytes: int, step_ms: float | None, budget_bytes: int
    ) -> str:
        """Why a plan of this peak and time is worse than none; "" if it is not, or nobody knows."""
        unplanned = self.by_shape.get(shape)
        if unplanned is None:
            return ""
        if peak_bytes > self.allowed_bytes(shape, start_bytes, budget_bytes):
            took = f"a step without one took {format_bytes(unplanned.peak_bytes)} of {format_bytes(budget_bytes)}"
            if start_bytes > unplanned.start_bytes:
                took += f", with {format_bytes(start_bytes - unplanned.start_bytes)} less there before it"
            return f"the leanest plan takes {format_bytes(peak_bytes)}, and {took}"
        # Above the budget, where steps without a plan come as low, a plan is there to be faster.
        slower = _CLEARLY_SLOWER if peak_bytes <= budget_bytes else 1.0
        if step_ms is not None and unplanned.is_timed and step_ms > slower * unplanned.step_ms:
            return (
                f"a step under the plan is predicted to take {step_ms:.1f} ms and {format_bytes(peak_bytes)}, and a "
                f"step without one took {unplanned.step_ms:.1f} ms and {format_bytes(unplanned.peak_bytes)}"
            )
        return ""
