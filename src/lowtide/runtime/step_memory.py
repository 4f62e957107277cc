"""Lowers a model's budget when a step runs out of memory or others take it, and reports steps that went over it."""

from torch import nn

from lowtide.device.out_of_memory import missing_bytes, tried_bytes
from lowtide.runtime.budget import StepBudget
from lowtide.runtime.call_shapes import CallShape
from lowtide.runtime.memory_held import held_by_plan, held_now
from lowtide.runtime.notices import Notices
from lowtide.runtime.planned_step import PlannedStep
from lowtide.runtime.plans_by_shape import PlansByShape
from lowtide.runtime.pressure import MemoryPressure
from lowtide.runtime.reserved_memory import ReservedMemory
from lowtide.runtime.status import Counters
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.units import format_bytes


class StepMemory:
    """Moves the budget, and the plans with it."""

    def __init__(self, budget: StepBudget, plans_by_shape: PlansByShape, counters: Counters, reasons: Notices) -> None:
        self._budget, self._plans_by_shape, self._counters, self._reasons = budget, plans_by_shape, counters, reasons
        self._pressure = MemoryPressure(budget)
        self._reserved = ReservedMemory(reasons) if budget.is_of_reserved else None
        self._times_out_of_memory = 0
        self._over_bytes, self._over_reason = 0, ""  # how far steps without a plan went over the budget, as it was told

    def note_peak(self, watch: OnlineTape) -> None:
        """A watched step is over."""
        peak = self._budget.resident_bytes + self._budget.batch_bytes + watch.live.peak
        self._counters.observed_peak_bytes = max(self._counters.observed_peak_bytes or 0, peak)
        # A proof of the last resort takes more for a moment: what lived tells of it, what room was asked for does not.
        over = int(max(watch.releaser.over_bytes, watch.live.peak - watch.releaser.budget_bytes))
        if self._reserved is not None:
            over -= self._budget.segments_bytes
        if over <= self._over_bytes:
            return
        why = "it is the least that letting go and making again could reach"
        if watch.peak_op:
            why = f"{watch.peak_op} beside what it makes, which shows only when it runs"
        reason = f"a step that ran online took up to {format_bytes(over)} more than the budget: {why}"
        if self._over_bytes:  # one reason, whatever the number: every step may have another
            self._reasons.correct(self._over_reason, reason)
        else:
            self._reasons.say(reason)
        self._over_bytes, self._over_reason = over, reason

    def note_watched(self) -> None:
        """A step without a plan is over, and what recorded it has let go."""
        if self._reserved is not None:
            self._reserved.note_watched(self._budget.device, self._budget.limit_bytes)

    def begin_step(self, step: PlannedStep | None) -> None:
        """A step begins under this plan, or without one."""
        if self._reserved is not None:
            self._reserved.begin_step(step)

    def lower(
        self,
        error: BaseException,
        attempt: int,
        step: PlannedStep | None,
        watch: OnlineTape | None,
        shape: CallShape | None,
    ) -> int | None:
        """A step ran out of memory: the budget is lower from now on.

        Args:
            attempt: How often this step was lowered before.
            step, watch: What it ran under.
            shape: Of its first call.

        Returns:
            The budget in bytes; None: it was the least already, and stays.
        """
        budget = self._budget
        used = budget.limit_bytes
        if step is not None:
            used = step.plan.predicted_peak_bytes
        elif watch is not None:
            used = budget.resident_bytes + watch.live.now + tried_bytes(error)
        lowered = budget.lower(used, missing_bytes(error, budget.device), attempt)
        least = None if shape is None else self._plans_by_shape.least_bytes.get(shape)
        if least is not None:
            lowered = max(lowered, least)
        if not budget.resident_bytes < lowered < budget.limit_bytes:
            return None
        self._times_out_of_memory += 1
        self.cap(lowered)
        return lowered

    def cap(self, budget_bytes: int) -> None:
        """Steps take no more than that from now on."""
        self._budget.cap(budget_bytes)
        self._plans_by_shape.change_budget(budget_bytes)
        times = "" if self._times_out_of_memory == 1 else f" {self._times_out_of_memory} times"
        self._reasons.say_latest(
            "out of memory", f"out of memory{times}: the budget is {format_bytes(budget_bytes)} now"
        )

    def spare_bytes(self, step: PlannedStep | None) -> int:
        """What a step under this plan leaves of the budget; 0 without one: nobody knows."""
        return 0 if step is None else self._budget.limit_bytes - step.plan.predicted_peak_bytes

    def what_held(self, step: PlannedStep | None, watch: OnlineTape | None) -> str:
        """What a step holds, by module, for whoever reads the error that ended it; "" if nobody knows."""
        if watch is not None:
            return held_now(self._budget.resident_bytes + self._budget.batch_bytes, watch.live.by_module())
        return "" if step is None else held_by_plan(step.plan)

    def follow_free_memory(self, model: nn.Module) -> None:
        """Between two steps: an automatic budget moves with what others leave."""
        moved = self._pressure.new_budget_bytes(model)
        if moved is not None:
            self._budget.move_to(moved)
            self._plans_by_shape.change_budget(moved)
            most = format_bytes(self._budget.most_bytes or moved)
            text = f"free memory has changed: the budget is {format_bytes(moved)} of {most}"
            self._reasons.say_latest("pressure", text)
