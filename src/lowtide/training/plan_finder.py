"""The plan that a step begins under: the one for its shape, as long as it fits beside what is there before the step."""

from torch import nn

from lowtide.shapes.call_shapes import CallShape
from lowtide.step.deepspeed_engines import is_partitioned
from lowtide.step.subclasses import wrapped_parameters
from lowtide.training.budget import StepBudget
from lowtide.training.notices import Notices
from lowtide.training.past_training import PastTraining
from lowtide.training.planned_step import PlannedStep
from lowtide.training.plans_by_shape import PlansByShape
from lowtide.training.step_memory import StepMemory
from lowtide.units import format_bytes


class PlanFinder:
    """Of one model."""

    def __init__(
        self,
        budget: StepBudget,
        plans_by_shape: PlansByShape,
        memory: StepMemory,
        past: PastTraining,
        reasons: Notices,
    ) -> None:
        self._budget, self._plans_by_shape, self._memory = budget, plans_by_shape, memory
        self._past, self._reasons = past, reasons
        self._was_sharded = plans_by_shape.is_sharded
        self._num_stepped = 0  # optimizers, whose state is known

    def why_lost(self, model: nn.Module) -> str:
        """Why nothing is known any more of where the parameters are; "" as long as it is."""
        sampled = self._past.sampled
        if self._was_sharded:
            return ""
        if is_partitioned(p for p in sampled if p is not None):
            self._plans_by_shape.is_sharded = True
            return "DeepSpeed's ZeRO-3 has partitioned the model since fit. Fit it afterwards"
        if self._past.are_others and wrapped_parameters(model):
            self._plans_by_shape.is_sharded = True
            return "the model was sharded after fit. Fit it afterwards"
        return ""

    def find(self, model: nn.Module, shape: CallShape, *, looks: bool) -> PlannedStep | None:
        """The plan for ``shape``, or its decisions with the optimizer's state as it is, or what was put aside before.

        None where none fits beside what is there: then another is asked for.

        Args:
            looks: Whether it is looked at what is there. Not after a step that failed, or that ran no backward: its
                tensors may be there for a while.
        """
        budget, memory, plans_by_shape = self._budget, self._memory, self._plans_by_shape

        def fits(other: PlannedStep) -> bool:
            within = other.plan.predicted_peak_bytes <= budget.limit_bytes
            return within and not memory.outgrown_bytes(model, other)

        self._note_state()
        of_shape = found = plans_by_shape.plan_for(shape)
        if looks:
            found = plans_by_shape.best_that_fits(shape, of_shape, fits)
        if found is not None and found is not of_shape:
            self._reasons.say_latest(
                "outgrown",
                "what is on the device before a step comes and goes: of two plans, a step runs under the one that fits",
            )
        if found is not None and (change := memory.state_change_bytes(found)):
            budget.follow_state()
            found = plans_by_shape.correct_state(found, change, budget.limit_bytes)
        more = 0 if found is None or not looks else memory.outgrown_bytes(model, found)
        if found is None or not more:
            return found
        if found.plan.predicted_peak_bytes > budget.limit_bytes:
            # None is leaner, and steps without one are dearer.
            return plans_by_shape.keep_least(found, more)
        self._reasons.say_latest(
            "outgrown",
            f"{format_bytes(more)} more are on the device before a step than its plan knows, and the budget has no "
            "room for that: the plan was dropped, another is made. Pass optimizer= to fit, so that its state is known",
        )
        plans_by_shape.plan_anew(found, more, budget.limit_bytes)
        return None

    def _note_state(self) -> None:
        """Where an optimizer has stepped for the first time, what was asked for before knows nothing of its state."""
        budget = self._budget
        if budget.optimizers.num_stepped == self._num_stepped:
            return
        self._num_stepped = budget.optimizers.num_stepped
        budget.follow_state()
        self._plans_by_shape.note_state(budget.lasting_state_bytes(), budget.limit_bytes)
