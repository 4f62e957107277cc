"""The life of a step: which calls of a model are part of it, what they run under, and when it is over.

    call of the model -> a plan for its shape?  yes: its tape, around this call; or, if it drops something outside the
                                                     model's calls, from here to the start of the backward that follows
                                                no:  an online tape, from here to the end of the backward that follows
    another op than planned -> an online tape from there on, in what the plan's part of the step leaves of the budget
    end of a backward -> the step is over: a recorded graph goes to the planner
    next step's first call -> plans that have come back are put in force

What belongs to one step lies in a ``RunningStep``. Nothing here raises into the training loop: an error of lowtide's
own becomes a reason, and the step is saved as it is.
"""

import threading
import time
import weakref
from typing import ClassVar

from torch import nn

from lowtide.device.names import is_accelerator
from lowtide.device.out_of_memory import is_out_of_memory
from lowtide.errors import ReplayError
from lowtide.options import FitOptions
from lowtide.planning.planner_process import PlannerProcess
from lowtide.recording.step_recording import StepRecording
from lowtide.shapes.call_shapes import CallShape
from lowtide.step.gradients_there import GradientsThere
from lowtide.step.seam import ModelSeams
from lowtide.step.sharding.units import is_gathered_once
from lowtide.tape.online.online_calls import KnownCalls
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.online.room import ExpectedBytes
from lowtide.tracing.model_facts import ModelFacts
from lowtide.training.budget import StepBudget
from lowtide.training.existing_checkpointing import ExistingCheckpointing
from lowtide.training.kinds_of_steps import WholeNumbers
from lowtide.training.notices import Notices
from lowtide.training.past_training import PastTraining
from lowtide.training.plan_finder import PlanFinder
from lowtide.training.planned_step import PlannedStep
from lowtide.training.plans_by_shape import PlansByShape
from lowtide.training.recorded_steps import RecordedSteps
from lowtide.training.running_step import Phase, RunningStep
from lowtide.training.shared_tiers import SharedTiers
from lowtide.training.status import Counters
from lowtide.training.step_memory import StepMemory
from lowtide.training.targets import likely_target_bytes
from lowtide.units import format_bytes

_MOST_RESERVED = 0.1  # for targets, of what the first step may make
_MOST_AWAITED = 16  # calls of a step whose backward may come apart: for so many backward passes nothing is told
_STEPS_INSIDE = (
    "another fitted model's steps begin between this one's forward and backward: what that model holds meanwhile is in "
    "its budget alone. Both together take up to the sum"
)
_OWN_CHECKPOINTING = (
    "the first step ran with the model's own checkpointing, as it would without lowtide: a percentage is of the step "
    "without it, which the next step's ops tell"
)
_NOT_GATHERED = "FSDP has not gathered every parameter yet: the next step is watched"
_RAN_OTHER_OPS = "the last step ran other ops than its plan"
_HOLDS_GRAPHS = (
    "something holds on to the graphs of earlier steps (a loss or metric that was not detached), so it is not known "
    "where a step ends: they run online. Call .detach() or .item() on what you keep"
)


def _held_more(more_bytes: int) -> str:
    return (
        f"the last step that left its plan held {format_bytes(more_bytes)} more than planned (sizes that depend on "
        "data, or more rows than its call shows): the rest of it ran within the budget without a plan"
    )


class Lifecycle:
    """Of the steps of one model.

    Attributes:
        plans_by_shape: The plans at hand.
        counters: What went by so far.
        memory: What steps may take, and took.
        recorded: Watched steps, whose graphs go to the planner.
        step: The present one, or one that has not begun.
        past: Training that goes past the model's call.
        seams: What is in place.
        awaited: More backward passes that may come of earlier calls, as in a pipeline.
        recovers: ``Recovery`` runs the present step, and sees to it when memory runs out.
    """

    _all: ClassVar[weakref.WeakSet["Lifecycle"]] = weakref.WeakSet()

    def __init__(
        self,
        facts: ModelFacts,
        options: FitOptions,
        budget: StepBudget,
        planner: PlannerProcess,
        tiers: SharedTiers,
        reasons: Notices,
    ) -> None:
        model = facts.model
        self._model, self._budget = weakref.ref(model), budget
        self._reasons, self._say = reasons, reasons.say
        self.counters = counters = Counters()
        self.plans_by_shape = PlansByShape(facts, options, planner, tiers, reasons)
        self.memory = StepMemory(budget, self.plans_by_shape, counters, reasons, options.on_excess)
        self.checkpointing = ExistingCheckpointing(model, self._say, options.checkpointing)
        self.past = PastTraining(model, counters, reasons)
        self._finder = PlanFinder(budget, self.plans_by_shape, self.memory, self.past, reasons)
        self._expected, self._known_calls = ExpectedBytes(), KnownCalls()
        self.recorded = RecordedSteps(
            model, budget, self.plans_by_shape, self.memory, counters, reasons, self._known_calls
        )
        self.seams = ModelSeams(model)
        self._numbers = WholeNumbers()
        self.step = RunningStep()
        self._last: PlannedStep | None = None  # that was in force
        self._ended_well = True  # the step before
        self.awaited = 0
        self.recovers = False
        self._all.add(self)

    def put(self, planned: PlannedStep) -> None:
        """Put a plan in force that was made elsewhere."""
        if planned.shapes:
            self.plans_by_shape.put(planned)
        else:
            self._last = planned

    @property
    def latest(self) -> PlannedStep | None:
        """The plan that was used or made last."""
        return self.plans_by_shape.plans[-1] if self.plans_by_shape.plans else self._last

    # -- a step begins --------------------------------------------------------------------------------------

    def is_open_to(self, thread: threading.Thread) -> bool:
        """Whether a call on ``thread`` may be part of a step; a step that another thread has left behind ends here."""
        self.seams.close_left_behind()
        owner = self.step.thread
        if owner is None or owner is thread:
            return True
        if self.step.phase is Phase.OVER:
            self._end_step()
        elif not owner.is_alive():  # nobody can go on with its forward pass
            self.abandon_step()
        return self.step.thread is None

    def add_call(self, model: nn.Module, shape: CallShape, args: tuple, kwargs: dict) -> RunningStep:
        """The model is called: the step that this is part of, which begins if none goes on."""
        if self.step.shapes and self._is_over():
            self._end_step()
        elif self.step.has_failed or self.step.is_forgotten:
            self._forget_step()
        shape = self._numbers.added_to(shape, args, kwargs)
        if not self.step.shapes:
            self._begin_step(model, shape, (args, kwargs))
        self.step.shapes.append(self.step.shape_in_step(shape))
        return self.step

    def begin_uncalled(self, planned: PlannedStep) -> None:
        """A step begins under a plan that a rehearsal made, and will not call the model itself."""
        self.step = RunningStep(threading.current_thread())
        self.step.begin_under(planned)
        self.memory.begin_step(planned)

    def _begin_step(self, model: nn.Module, shape: CallShape, batch: object) -> None:
        thread = threading.current_thread()
        around = [other for other in self._all if other.step.is_on(thread)]
        for other in around:
            other._reasons.note(_STEPS_INSIDE)
            other.step.is_shared = True
        step = self.step = RunningStep(thread)
        step.is_shared = bool(around)
        step.has_gradients, step.trained = self.past.has_gradients(), self.past.trained_since()
        step.sampled_gradients = self.past.gradients() if step.has_gradients else []
        shape = step.shape_in_step(shape)
        self.memory.follow_free_memory(model)
        step.runs_own_checkpointing = not self.replace_checkpointing()
        step.began_s = time.perf_counter()
        step.has_budget = self._budget.absolute_bytes is not None
        if lost := self._finder.why_lost(model):
            self.plans_by_shape.refuse(shape, lost, saved=True)
            step.why_no_plan = lost
            self.memory.begin_step(None)
            return
        if self._last is not None:
            self._last.tape.settle_copies()  # of a step whose loss failed: what they copy is still there
        if (changed := self.memory.look(model, batch)) and not self.plans_by_shape.is_sharded:
            self.recorded.clear()
            self.plans_by_shape.start_afresh(*changed)
        self.recorded.request_plans()
        ended_well, self._ended_well = self._ended_well, False
        planned = self._finder.find(model, shape, looks=ended_well)
        self.memory.begin_step(planned)
        if planned is not None:
            self._last = planned
            step.begin_under(planned)
            planned.tape.sizes_vary = False
            return
        step.why_no_plan = self.plans_by_shape.why_no_plan(shape)
        if step.runs_own_checkpointing:
            step.why_no_plan = _OWN_CHECKPOINTING
        wants_graph = self.plans_by_shape.wants_graph(shape) and not self.recorded.has(shape)
        if self.plans_by_shape.is_sharded and not is_gathered_once(model):  # what a graph names is made in this step
            step.why_no_plan, wants_graph = _NOT_GATHERED, False
        if wants_graph:
            step.recording = StepRecording(model, self._budget.device)
        self._open_watch(model, batch)

    def replace_checkpointing(self) -> bool:
        """Switch the model's own off. False: not yet.

        As long as nobody knows what a step may take, it might not fit without.
        """
        waits = self._budget.absolute_bytes is None and self._budget.first_bytes is None
        if waits and self.checkpointing.will_be_replaced:
            return False
        self.checkpointing.switch_off()
        return True

    # -- what a step runs under ------------------------------------------------------------------------------

    def go_online(self, last_op: int) -> OnlineTape | None:
        """The step runs other ops than its plan after ``last_op``: the rest of it is online."""
        planned, model = self.step.planned, self._model()
        assert planned is not None and model is not None
        made = self.memory.made_bytes()
        made = made if made is not None and made > 0 else planned.made_bytes_after(last_op)
        # Where all that is allocated is known, the batch is resident, as all that was there before the step.
        there = made if self._budget.counts_all else planned.graph.resident["batch"] + made
        if (counted := planned.tape.planned_bytes) is not None and counted.passed_by:
            self._reasons.say_first("passed", _held_more(counted.passed_by))
            planned.kind = None
        self.step.left_after = last_op
        try:
            self._open_watch(model, (), unseen_bytes=there)
        except Exception as error:  # the step goes on without us
            self.fail(error)
        return self.step.watch

    def _open_watch(self, model: nn.Module, batch: object, unseen_bytes: int = 0) -> None:
        budget_bytes, recording = self._budget.for_step(model, batch, unseen_bytes), self.step.recording
        watch = OnlineTape(model, budget_bytes, self._expected, self._known_calls, recording)
        self.step.watch = watch
        watch.begin_step(unseen_bytes)
        for storage in self.memory.held() if not unseen_bytes else ():
            watch.live.add(storage)
        if self.step.has_gradients and not unseen_bytes:
            there = GradientsThere(model, self._budget.device)
            watch.gone_bytes = there.let_go
            if recording is not None:
                recording.gradients = there
        if self._expected.inputs_bytes is None and not (unseen_bytes or self._budget.counts_all):
            # They are mostly as large as the batch; there may be more of them.
            likely = max(self._budget.batch_bytes, likely_target_bytes(model, batch, self._budget.device))
            watch.reserve(int(min(likely, _MOST_RESERVED * budget_bytes)))
        self.step.seam = self.seams.open(watch)

    def put_in_place(self, planned: PlannedStep) -> None:
        """The tape of a plan that drops something outside the model's calls is in place from here on."""
        self.leave_plan()
        self.step.plan_seam = self.seams.open(planned.tape)
        planned.tape.enter_step()

    def leave_plan(self, *, failed: bool = False) -> None:
        """A plan that was in place from the model's call on goes: backward begins, or another step.

        Args:
            failed: Neither does. What the plan has beyond this did not run, and that is no other step than planned.
        """
        seam, self.step.plan_seam = self.step.plan_seam, None
        if seam is not None:
            self.seams.close(seam)
            if self.step.planned is not None:
                self.step.planned.tape.leave_region(failed=failed)

    # -- a step ends ----------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A backward begins that creates no graph, of the present step or of another model's."""
        step = self.step
        if step.sampled_gradients and not step.num_backwards:
            step.adds = any(gradient() is not None for gradient in step.sampled_gradients)

    def end_backward(self, error: BaseException | None, *, retains: bool, creates: bool) -> None:
        """A backward of the present step has ended, or failed."""
        step = self.step
        step.spoiled |= error is not None
        if step.recording is not None and (model := self._model()) is not None:
            step.recording.note_backward(model)
        if error is not None and is_out_of_memory(error):
            if self.recovers:
                return
            self.note_out_of_memory(error)
        if creates and error is None:  # part of a loss: its own backward is to come
            return
        step.note_backward(retains=retains)
        if step.thread is not threading.current_thread():
            step.phase, step.spoiled = Phase.OVER, True
            if step.watch is not None:
                self._say("backward runs on another thread than the forward pass: no plan comes of such steps")
        elif not step.is_claimed:
            self._end_step()
            self.awaited = min(_MOST_AWAITED, self.awaited + retains)

    def _is_over(self) -> bool:
        """Whether the present step is, though its backward left something that is held. Asked when a call comes."""
        step = self.step
        if step.phase is Phase.OVER:
            return True
        if step.watch is None or step.phase is not Phase.BACKWARD or step.spoiled:
            return False
        if step.num_awaited > _MOST_AWAITED:  # no pipeline is that deep
            step.spoiled = True
            self._say(_HOLDS_GRAPHS)
            return True
        return not step.is_claimed or step.retained or step.num_awaited <= 0

    def settle(self) -> None:
        """End the present step, if nothing holds its graph any more."""
        if self.step.thread is threading.current_thread() and self.step.is_finished:
            self._end_step()

    def _end_step(self) -> None:
        self.memory.stop_counting()
        step, counters = self._put_away(), self.counters
        planned, watch = step.planned, step.watch
        # A recorded step is dearer than others; a device's steps are not over yet.
        is_timed = type(watch) is OnlineTape and not is_accelerator(self._budget.device)
        step_ms = 1e3 * (time.perf_counter() - step.began_s) if is_timed else None
        self._ended_well = not step.spoiled
        counters.steps += 1
        counters.plan_left_steps += planned is not None and watch is not None
        counters.why_not_planned = step.why_no_plan
        if step.shapes and not step.spoiled:
            self.plans_by_shape.note_kind(step.shapes[0], step.kind)
            if step.adds is not None:
                self.plans_by_shape.note_gradients(step.shapes[0], adds=step.adds)
        if planned is not None:
            counters.why_not_planned = _RAN_OTHER_OPS if self._has_left_plan(step, planned) else ""
        counters.planned_steps += not counters.why_not_planned
        counters.planned_calls += step.planned_calls
        self.awaited = min(_MOST_AWAITED, self.awaited + max(0, len(step.shapes) - 1))
        if watch is not None:
            self._end_watch(step, watch, is_whole=not step.spoiled)
            self.memory.note_watched()
        # Of more calls than planned, as in a pipeline, each holds what its plan knows: none of them is judged alone.
        ran_plan = not counters.why_not_planned and (planned is None or len(step.shapes) == len(planned.shapes))
        peak = self.memory.end_step(
            planned, ran_plan=ran_plan, beside_bytes=self._expected.inputs_bytes or 0, is_shared=step.is_shared,
            spoiled=step.spoiled, why_no_plan=step.why_no_plan,
        )  # fmt: skip
        if peak is None or step.spoiled or step.is_shared:
            return
        if planned is None and step.runs_own_checkpointing:
            self._budget.first_bytes = peak
        elif planned is None and step.has_budget:
            self.plans_by_shape.unplanned.note(step.shapes[0], peak, self.memory.start_bytes, step_ms)
        elif ran_plan and planned is not None and planned.shapes and not planned.tape.proved:
            self.memory.judge_planned(planned, peak)
        elif planned is not None and planned.shapes and watch is not None:
            self.plans_by_shape.note_left(planned, peak)

    def _has_left_plan(self, step: RunningStep, planned: PlannedStep) -> bool:
        """Whether a step that is over ran other ops than ``planned``, under which it began."""
        if why := step.why_unlike_plan:
            self._say(why)
        diverged = bool(why) or step.watch is not None
        if diverged:
            self._numbers.look()
        if planned.shapes:
            self.plans_by_shape.note_step(planned, step.made_nodes, diverged=diverged)
        return diverged

    def _end_watch(self, step: RunningStep, watch: OnlineTape, *, is_whole: bool) -> None:
        """What watched a step is done; ``is_whole``: with all of the step, and a plan is wanted for it."""
        watch.end_step()
        self.memory.note_peak(watch)
        self.recorded.tell(watch)
        if is_whole and step.shapes and step.recording is not None:
            self.recorded.add(step, watch, step.recording)

    def _put_away(self, *, failed: bool = False) -> RunningStep:
        """The present step is no more, and nothing of it is in place; see ``leave_plan``."""
        is_called = self.step.phase is Phase.FORWARD
        if not is_called:  # else the call goes on, and leaves the plan's region when it returns
            self.leave_plan(failed=failed or self.step.spoiled)
        step, self.step = self.step, RunningStep()
        if step.planned is not None:
            step.planned.tape.on_divergence = step.planned.tape.planned_bytes = None  # they refer to us
        for seam in step.seams:
            self.seams.close(seam)
        if is_called:  # no other step begins in it
            self.step.begin_call()
        return step

    def _forget_step(self) -> None:
        """What has begun was no step. Its calls ran all the same."""
        step = self._put_away()
        self.counters.planned_calls += step.planned_calls
        if step.watch is not None:
            self._end_watch(step, step.watch, is_whole=False)

    def abandon_step(self) -> None:
        """What has begun is no step: nobody runs its backward any more."""
        step = self._put_away(failed=True)
        if step.watch is not None:
            self._end_watch(step, step.watch, is_whole=False)
        self.memory.forget_step()

    def fail(self, error: Exception) -> None:
        """An error of our own: the step goes on without us."""
        self.counters.why_not_planned = "an error of lowtide's own"
        self.awaited += bool(self.step.shapes)  # the step's backward
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        self._say(f"an error of lowtide's own, the step is saved whole: {what}")
        step = self._put_away(failed=True)
        if step.watch is not None:
            step.watch.stop_observing()
        self.memory.forget_step()

    def look_at_seals(self, *, waits: bool) -> None:
        """Tell of replays with other bits, as far as a device has said so: backward raises it, if one is to come."""
        planned = [*self.plans_by_shape.plans, *([self._last] if self._last is not None else [])]
        for seals in {id(p.tape): p.tape.seals for p in planned}.values():
            if seals is not None:
                try:
                    seals.settle() if waits else seals.look(waits=False)
                except ReplayError as error:
                    self._say(" ".join(str(error).split()))

    def close(self) -> None:
        """Nothing is watched any more; a graph that is still there keeps its handles."""
        self.look_at_seals(waits=True)
        self.abandon_step()
        self.recorded.clear()
        self.checkpointing.restore()

    # -- memory ---------------------------------------------------------------------------------------------

    def lower_budget(self, error: BaseException, attempt: int = 0) -> int | None:
        """The present step ran out of memory: the budget is lower from now on, and plans with it.

        Call it while the error's frames still hold what the step has made.

        Args:
            attempt: How often this step was lowered before.

        Returns:
            The budget in bytes; None: it was the least already, and stays.
        """
        try:
            return self.memory.lower(error, attempt, self.step)
        except Exception as own:
            self.fail(own)
            return None

    def what_held(self) -> str:
        """What the present step holds, by module, for whoever reads the error that ended it; "" if nobody knows."""
        try:
            return self.memory.what_held(self.step)
        except Exception as own:
            self.fail(own)
            return ""

    def note_out_of_memory(self, error: BaseException) -> None:
        """The present step has, with ``error``, and nobody runs it again."""
        if held := self.what_held():
            error.add_note(held)
        self.lower_budget(error)

    def spare_bytes(self) -> int:
        """What the present step leaves of the budget, as far as a plan says."""
        return self.memory.spare_bytes(self.step.planned)
