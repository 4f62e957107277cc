"""Lowers a model's budget when a step runs out of memory or others take it, and reports steps that went over it."""

import weakref

import torch
from torch import nn

from lowtide.device.block_size import in_blocks
from lowtide.device.memory import allocated_bytes, segments_of, unsplit_bytes
from lowtide.device.names import is_accelerator
from lowtide.device.out_of_memory import missing_bytes, tried_bytes
from lowtide.options import WARN
from lowtide.step.data_parallel import gradients_are_buckets, unseen_bucket_bytes
from lowtide.step.operators import allocated_bytes as storage_bytes
from lowtide.step.operators import gradient_of, storage_of, tensors_in
from lowtide.step.subclasses import plain_tensors
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.planned_bytes import PlannedBytes
from lowtide.tape.values import is_view_of_leaf
from lowtide.training.budget import StepBudget
from lowtide.training.excess import ONLINE, OWN_BYTES, PLANNED, UNTOLD_SHARE, WHOLE, Excess
from lowtide.training.memory_held import held_by_plan, held_now
from lowtide.training.notices import Notices
from lowtide.training.planned_step import PlannedStep
from lowtide.training.plans_by_shape import PlansByShape
from lowtide.training.pressure import MemoryPressure
from lowtide.training.reserved_memory import ReservedMemory
from lowtide.training.running_step import RunningStep
from lowtide.training.status import Counters
from lowtide.training.step_peak import StepPeak
from lowtide.units import format_bytes

_NOTHING_FITS = (
    "lowtide let go of all that it could, and the step does not fit in what the device has. Reduce the batch, pass a "
    "lower budget,\nor let the allocator's segments grow (PYTORCH_ALLOC_CONF=expandable_segments:True): less is lost "
    "between blocks."
)
_LEAST = "it is the least that letting go and making again could reach"
_STATE_CHECKS = 2  # of one plan: looking at each tensor of a state takes a millisecond or more


class StepMemory:
    """Moves the budget, and the plans with it."""

    def __init__(
        self,
        budget: StepBudget,
        plans_by_shape: PlansByShape,
        counters: Counters,
        reasons: Notices,
        on_excess: str = WARN,
    ) -> None:
        self._budget, self._plans_by_shape, self._counters, self._reasons = budget, plans_by_shape, counters, reasons
        self._pressure = MemoryPressure(budget)
        self._reserved = ReservedMemory(reasons) if budget.is_of_reserved else None
        self._times_out_of_memory = 0
        self.excess = Excess(on_excess, budget, plans_by_shape, counters, reasons)
        self._online_cause = ""  # why the present step takes what it does, as far as it ran online
        self._peak = StepPeak(reasons)
        self._was_counted = False  # the last step
        self._has_budget = False  # the present step: no percentage that waits for it
        # Before the present step: all that was there, or, where nobody counts all, what is known to be.
        self.start_bytes = self._parameter_bytes = 0
        self._online_bytes = 0  # what the present step took, as an online tape counts it
        # What calls of the last step returned, and whoever called may hold: its memory, by weak reference.
        self._returned: list[weakref.ref[torch.UntypedStorage]] = []
        self._held: list[weakref.ref[torch.UntypedStorage]] = []  # of these, what was there when the present step began

    @property
    def highest_peak_bytes(self) -> int:
        """As far as it is known; of the present step as an online tape counts it."""
        return max(self._counters.observed_peak_bytes or 0, self._online_bytes)

    def note_peak(self, watch: OnlineTape) -> None:
        """A watched step is over."""
        peak = self._budget.resident_bytes + self._budget.batch_bytes + watch.live.peak
        self._online_bytes = max(self._online_bytes, peak)
        if watch.releaser.lowered_bytes:
            self._run_short(int(watch.releaser.lowered_bytes))
            return
        # What was counted: the releaser also knows for how much more room was asked.
        over = int(watch.live.peak - watch.releaser.budget_bytes) - self._budget.segments_bytes
        workspace_bytes, op = watch.peak_workspace
        self._online_cause = _LEAST
        if watch.ran_opaque:
            self._online_cause = f"what compiled code stores ({watch.ran_opaque}) is not seen, and saved"
        elif over <= 0:
            self._online_cause = "something was made in it that nobody saw"
        elif 2 * workspace_bytes >= over:
            taken = format_bytes(workspace_bytes)
            self._online_cause = f"{op} takes {taken} beside what it makes, which shows only when it runs"

    def _run_short(self, lowered_bytes: int) -> None:
        """A step without a plan found that the device has less than the budget, let go of more, and went on."""
        lowered = self._budget.limit_bytes - lowered_bytes
        if lowered <= self._budget.resident_bytes:  # it went on all the same: others took that memory, perhaps
            return
        self._times_out_of_memory += 1
        self.cap(lowered)

    def note_watched(self) -> None:
        """A step without a plan is over, and what recorded it has let go."""
        if self._reserved is not None:
            self._reserved.note_watched(self._budget.device, self._budget.limit_bytes)

    def look(self, model: nn.Module, batch: object) -> tuple[int, int] | None:
        """Note what is there before a step. The bytes of the parameters before and now, where they have changed.

        Args:
            batch: What the first call of the model is given.
        """
        before = self._parameter_bytes
        if self._budget.counts_all:
            start_bytes = allocated_bytes(self._budget.device)
            if start_bytes == self.start_bytes:  # as before the last step
                return None
            self.start_bytes = start_bytes or 0
        if self._budget.counts_all:
            self._parameter_bytes = sum(p.nbytes for p in model.parameters())
        else:
            resident_bytes, self._parameter_bytes = self._budget.quick_resident_bytes(model)
            self.start_bytes = resident_bytes + self._budget.batch_bytes_beside(batch)
        return (before, self._parameter_bytes) if 0 < before != self._parameter_bytes else None

    def outgrown_bytes(self, model: nn.Module, step: PlannedStep) -> int:
        """How much more is there before this step than its plan knows, where the budget has no room for that; else 0.

        Where nobody counts all, as on a CPU, that is the model's, the optimizer's and the batch. Not of a sharded model
        there: what it gathers comes and goes.
        """
        allocated = self.start_bytes
        comes_and_goes = self._plans_by_shape.is_sharded and not self._budget.counts_all
        if not allocated or not step.shapes or comes_and_goes:
            return 0
        resident, limit = step.graph.resident, self._budget.limit_bytes
        # Without a look at each gradient: as if there were none yet, which the plan counts as there.
        most = allocated - (step.plan.resident_bytes - resident.get("gradients", 0))
        spare = max(0, limit - step.plan.predicted_peak_bytes) + int(UNTOLD_SHARE * limit)
        if most <= spare or allocated <= step.fits_beside_bytes:
            return 0
        made = {
            s._cdata: s.nbytes()
            for p in model.parameters()
            if (grad := gradient_of(p)) is not None
            for t in plain_tensors(grad)
            if (s := storage_of(t)) is not None
        }
        made_bytes = sum(in_blocks(size, self._budget.device.type) for size in made.values())
        if gradients_are_buckets(model):  # which are there, whatever ``.grad`` says
            made_bytes += unseen_bucket_bytes(model)
        gradients = min(made_bytes, resident.get("gradients", 0))
        if most - gradients <= spare:
            step.fits_beside_bytes = allocated if gradients else 0
            return 0
        return most - gradients

    def state_change_bytes(self, step: PlannedStep) -> int:
        """How much more the optimizer keeps than this step's plan knows, less if negative; 0: as foreseen.

        State comes with the first step, so it is compared where there is some, in the first steps of each plan.
        """
        if step.state_checks >= _STATE_CHECKS or not (state_bytes := self._budget.lasting_state_bytes()):
            return 0
        step.state_checks += 1
        change = state_bytes - step.graph.resident.get("optimizer", 0)
        return change if abs(change) > UNTOLD_SHARE * self._budget.limit_bytes else 0

    def begin_step(self, step: PlannedStep | None) -> None:
        """A step begins under this plan, or without one: from here on it is counted."""
        if self._reserved is not None:
            self._reserved.begin_step(step, self._budget.device)
        self.forget_step()
        self._has_budget = self._budget.absolute_bytes is not None
        self._budget.note_limit()
        device = self._budget.device
        # Of a sharded model blocks belong to several streams, and one that was used on another is not free at once.
        knows_blocks = is_accelerator(device) and not self._plans_by_shape.is_sharded
        if knows_blocks and step is not None and not step.saw_segments:
            step.saw_segments = True
            if (segments := segments_of(device)) is not None:
                step.foresee_from(segments)
        afresh = step is not None and step.counted_peak_bytes is None
        self._held, self._returned = self._returned, []
        held_bytes = sum(map(storage_bytes, self.held()))
        self._peak.begin(device, self.start_bytes + held_bytes, afresh=afresh)

    def note_returned(self, output: object, given: object) -> None:
        """A call of the model that was ``given`` this has returned ``output``.

        On a CPU nobody counts what is there before a step. What the loop holds of the last one is there until it binds
        the next output (``logits, loss = model(x)``): it goes in mid-step, and counts as freed then.
        """
        if self._budget.counts_all:
            return
        known = {storage._cdata for tensor in tensors_in(given) if (storage := storage_of(tensor)) is not None}
        for tensor in tensors_in(output):
            storage = storage_of(tensor)
            if (
                storage is None
                or storage._cdata in known
                or isinstance(tensor, nn.Parameter)
                or is_view_of_leaf(tensor)
            ):
                continue
            if tensor.device == self._budget.device:
                known.add(storage._cdata)
                self._returned.append(weakref.ref(storage))

    def held(self) -> list[torch.UntypedStorage]:
        """What calls of the last step returned, and is there still."""
        return [storage for reference in self._held if (storage := reference()) is not None]

    def made_bytes(self) -> int | None:
        """What the present step has made and still holds; None where nobody counts."""
        return None if self._peak.made_bytes is None else self._peak.made_bytes()

    def planned_bytes(self, step: PlannedStep) -> PlannedBytes | None:
        """What is to live in the present step, under this plan; None where nobody counts."""
        if self._budget.is_of_reserved or not self._has_budget or self._peak.made_bytes is None:
            return None
        most = max(self._budget.limit_bytes, self._plans_by_shape.allowed_bytes(step))
        device, made = self._budget.device, self._peak.made_bytes
        step.planned_bytes.begin_step(most - step.graph.before_bytes, made, lambda: unsplit_bytes(device))
        return step.planned_bytes

    def stop_counting(self) -> None:
        """The step's ops have run: what its record needs from here on is not of the step."""
        self._peak.stop()

    def end_step(
        self,
        step: PlannedStep | None,
        *,
        ran_plan: bool,
        beside_bytes: int = 0,
        is_shared: bool = False,
        spoiled: bool = False,
        why_no_plan: str = "",
    ) -> int | None:
        """The step is over: note its peak and return it.

        Args:
            ran_plan: It ran as planned, all of it.
            beside_bytes: What was there before the step, and no call of the model was given (targets).
            is_shared: Another model's step or backward ran in it.
            spoiled: It failed, or mixes with another.
            why_no_plan: Where it ran without one.
        """
        counted, estimated = self._peak.end(beside_bytes), self._online_bytes or None
        self._was_counted = counted is not None
        if ran_plan and step is not None:
            if counted is None and self._budget.counts_all:
                counted = step.counted_peak_bytes
            elif step.counted_peak_bytes is None:
                step.counted_peak_bytes = counted
        counters, peak = self._counters, estimated if counted is None else counted
        counters.last_peak_bytes = peak
        if peak is None:
            counters.uncounted_steps += 1
        else:
            counters.observed_peak_bytes = max(counters.observed_peak_bytes or 0, peak)
            if self._has_budget and (over := peak - self._budget.judged_bytes) > 0:
                counters.over_budget_steps += 1
                counters.excess_bytes = max(counters.excess_bytes, over)
            acts = self._has_budget and not (is_shared or spoiled)
            if self._online_cause:
                self.excess.note(ONLINE, peak, self._online_cause, acts=acts)
            elif step is None:
                self.excess.note(WHOLE, peak, why_no_plan or "it has no plan", acts=acts)
            elif ran_plan and counted is not None:
                why = self._cause_under(step, peak, is_shared)
                self.excess.note(PLANNED, peak, why, predicted_bytes=step.told_peak_bytes, acts=acts)
        self._online_bytes, self._online_cause = 0, ""
        return peak

    def forget_step(self) -> None:
        """What has begun is no step, or none that ends; what it took counts all the same."""
        peak = self._peak.end() or self._online_bytes
        if peak:
            self._counters.observed_peak_bytes = max(self._counters.observed_peak_bytes or 0, peak)
            if self._online_cause:
                self.excess.note(ONLINE, peak, self._online_cause, acts=False)
        self._online_bytes, self._online_cause = 0, ""

    def _cause_under(self, step: PlannedStep, peak: int, is_shared: bool) -> str:
        """Why a step under this plan took more than the plan says."""
        if is_shared:
            return "another model's step or backward ran in it, and is counted too"
        if step.tape.proved:
            return "ops that nobody had proven ran twice in it"
        if peak <= step.plan.measurable_peak_bytes + OWN_BYTES:
            return "steps before it left the allocator larger blocks than the plan was made for"
        return "something was there that the plan does not know, or sizes were others"

    def judge_planned(self, step: PlannedStep, peak: int) -> None:
        """A step under a plan took ``peak``: the plan goes if that is more than it is worth."""
        if not self._budget.is_of_reserved and self._was_counted:
            self._plans_by_shape.note_peak(step, peak - OWN_BYTES)

    def lower(
        self,
        error: BaseException,
        attempt: int,
        step: RunningStep,
    ) -> int | None:
        """A step ran out of memory: the budget is lower from now on.

        Args:
            attempt: How often this step was lowered before.

        Returns:
            The budget in bytes; None: it was the least already, and stays.
        """
        budget = self._budget
        used = budget.limit_bytes
        if step.planned is not None:
            used = step.planned.plan.predicted_peak_bytes
        elif step.watch is not None:
            used = budget.resident_bytes + step.watch.live.now + tried_bytes(error)
        lowered = budget.lower(used, missing_bytes(error, budget.device), attempt)
        least = self._plans_by_shape.least_bytes.get(step.shapes[0]) if step.shapes else None
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

    def what_held(self, step: RunningStep) -> str:
        """What a step holds, by module, for whoever reads the error that ended it; "" if nobody knows."""
        if (watch := step.watch) is not None:
            held = held_now(self._budget.resident_bytes + self._budget.batch_bytes, watch.live.by_module())
            return f"{held}\n{_NOTHING_FITS}" if watch.releaser.ran_short else held
        return "" if step.planned is None else held_by_plan(step.planned.plan)

    def follow_free_memory(self, model: nn.Module) -> None:
        """Between two steps: an automatic budget moves with what others leave."""
        moved = self._pressure.new_budget_bytes(model)
        if moved is not None:
            self._budget.move_to(moved)
            self._plans_by_shape.change_budget(moved)
            most = format_bytes(self._budget.most_bytes or moved)
            text = f"free memory has changed: the budget is {format_bytes(moved)} of {most}"
            self._reasons.say_latest("pressure", text)
