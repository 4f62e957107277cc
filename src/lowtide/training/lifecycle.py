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
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from lowtide.device.names import is_accelerator
from lowtide.device.out_of_memory import is_out_of_memory
from lowtide.errors import LowtideError, ReplayError
from lowtide.options import FitOptions
from lowtide.planning.planner_process import PlannerProcess
from lowtide.shapes.call_shapes import CallShape, shape_of_call
from lowtide.step import module_calls, whole_modules
from lowtide.step.other_hooks import hooks_of_others
from lowtide.step.seam import ModelSeams
from lowtide.step.sharding.units import is_gathered_once
from lowtide.tape import attach
from lowtide.tape.online.online_calls import KnownCalls
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.online.room import ExpectedBytes
from lowtide.tape.program import TapedCall
from lowtide.tape.tape import Tape
from lowtide.tracing.model_facts import ModelFacts
from lowtide.training.budget import StepBudget
from lowtide.training.call_marks import marks_in
from lowtide.training.existing_checkpointing import ExistingCheckpointing
from lowtide.training.notices import Notices
from lowtide.training.past_training import PastTraining
from lowtide.training.plan_finder import PlanFinder
from lowtide.training.planned_step import PlannedStep, num_nodes
from lowtide.training.plans_by_shape import PlansByShape
from lowtide.training.recorded_steps import RecordedSteps
from lowtide.training.running_step import Phase, RunningStep
from lowtide.training.shared_tiers import SharedTiers
from lowtide.training.status import Counters
from lowtide.training.step_memory import StepMemory
from lowtide.training.watched_step import WatchedStep

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
_RAN_OTHER_OPS_UNSEEN = (
    "a step ran other ops than its plan where that keeps everything, which shows only at the end: it may have taken "
    "more than the budget. Ops of such plans are followed one by one from now on"
)
_HOLDS_GRAPHS = (
    "something holds on to the graphs of earlier steps (a loss or metric that was not detached), so it is not known "
    "where a step ends: they run online. Call .detach() or .item() on what you keep"
)


class Lifecycle:
    """The model's own call, and an observer of backward.

    Attributes:
        options: What ``fit`` was asked for.
        plans_by_shape: The plans at hand.
        counters: What went by so far.
        memory: What steps may take, and took.
        recorded: Watched steps, whose graphs go to the planner.
        step: The present one, or one that has not begun.
        recovers: ``Recovery`` runs the present step, and sees to it when memory runs out.
    """

    lowtide = True  # how ``check_supported`` knows a fitted model
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
        self._compiled = module_calls.CompiledCall(model, "") if "" in facts.compiled else None
        self.before = None if self._compiled is None else self._compiled.before
        self._model, self.options, self._budget = weakref.ref(model), options, budget
        self._reasons, self._say = reasons, reasons.say
        self.counters = counters = Counters()
        self.plans_by_shape = PlansByShape(facts, options, planner, tiers, reasons)
        self.memory = StepMemory(budget, self.plans_by_shape, counters, reasons)
        self.checkpointing = ExistingCheckpointing(model, self._say, options.checkpointing)
        self._past = PastTraining(model, self, counters, reasons)
        self._finder = PlanFinder(budget, self.plans_by_shape, self.memory, self._past, reasons)
        self._expected, self._known_calls = ExpectedBytes(), KnownCalls()
        self.recorded = RecordedSteps(
            model, budget, self.plans_by_shape, self.memory, counters, reasons, self._known_calls
        )
        self._seams = ModelSeams(model)
        self.step = RunningStep()
        self._last: PlannedStep | None = None  # that was in force
        self._ended_well = True  # the step before
        self._awaited = 0  # more backward passes that may come of earlier calls, as in a pipeline
        self._suspended_in_backward: dict[int, ExitStack] = {}  # by thread: what is away until its backward ends
        self._end_part: Callable[[], None] | None = None  # of the region that is open
        self._paused = False
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

    # -- calls of the model ---------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None  # it is being called
        call = self._compiled or model._call_impl
        observer = module_calls.thread_state.observer
        if observer is not None:
            return attach.call_in_open_region(observer, call, args, kwargs)
        with self._seams.others_suspended(), self.around(model, args, kwargs):
            output = call(*args, **kwargs)
            if self.step.phase is Phase.FORWARD:
                self.step.graphs += marks_in(output)
            return output

    def around(self, model: nn.Module, args: tuple, kwargs: dict) -> AbstractContextManager[None]:
        """What surrounds a call of the model, or a region that counts as one."""
        if attach.cannot_tape():
            self._past.note_untaped_call()
            return nullcontext()
        if not torch.is_grad_enabled():  # no part of the step: nothing is watched, what it leaves is counted
            return self._seams.suspended(self.step.seams)
        if not self._is_ours(threading.current_thread()):
            self._say("the model was called on two threads at once: only one is planned")
            return nullcontext()
        if self.step.phase is Phase.FORWARD:  # nobody observes the calls inside, or they would have told
            return nullcontext()
        self.counters.calls += 1
        self._past.note_call()
        try:
            return self._around(model, shape_of_call(model, args, kwargs), args, kwargs)
        except Exception as error:  # nothing of ours may end the training
            self._fail(error)
            return nullcontext()

    def _is_ours(self, thread: threading.Thread) -> bool:
        """Whether a call on ``thread`` may be part of a step; a step that another thread has left behind ends here."""
        self._seams.close_left_behind()
        owner = self.step.thread
        if owner is None or owner is thread:
            return True
        if self.step.phase is Phase.OVER:
            self._end_step()
        elif not owner.is_alive():  # nobody can go on with its forward pass
            self.abandon_step()
        return self.step.thread is None

    def _around(self, model: nn.Module, shape: CallShape, args: tuple, kwargs: dict) -> AbstractContextManager[None]:
        """What surrounds this call: a planned tape, or the watch."""
        if self.step.shapes and self._is_over():
            self._end_step()
        elif self.step.has_failed or self.step.is_forgotten:
            self._forget_step()
        if not self.step.shapes:
            self._begin_step(model, shape, (args, kwargs))
        step = self.step
        shape, position = step.shape_in_step(shape), len(step.shapes)
        step.shapes.append(shape)
        if step.planned is not None and step.watch is None:
            return self._planned(step.planned, position, shape)
        if step.watch is None:
            return _Call(self, position)
        if isinstance(step.watch, WatchedStep):
            step.watch.begin_call(model, args, kwargs)
        return self._observed(step.watch)

    def _planned(self, planned: PlannedStep, position: int, shape: CallShape) -> AbstractContextManager[None]:
        """A call under a plan, the one at ``position`` of the step."""
        self._reasons.say_other_hooks(".".join(hooks_of_others()).strip("."))
        at = position % len(planned.shapes)  # calls whose backward never came may be among them
        tape = planned.tape
        if planned.shapes[at] != shape:
            if not planned.serves(at, shape):
                watch = self._go_online(planned.last_op_before(position))
                return _Call(self, position) if watch is None else self._observed(watch)
            tape.sizes_vary = planned.shapes[at].sizes != shape.sizes
        if not planned.is_known:
            tape.matches_all = True  # nobody has seen a real step under it
        self.step.planned_calls += 1
        tape.on_divergence = self._go_online
        if planned.keeps_everything and not tape.matches_all:
            return _Call(self, position)
        if planned.needs_whole_step:
            if at == 0:
                self._leave_plan()
                self.step.plan_seam = self._seams.open(tape)
                tape.enter_step()
        else:
            call = planned.calls[at] if at < len(planned.calls) else TapedCall()
            return _Call(self, position, attach.TapedRegion(tape, call, whole_step=False))
        return self._observed(tape)

    @contextmanager
    def _observed(self, tape: Tape | OnlineTape) -> Iterator[None]:
        """The model's call inside a step that is taped as a whole."""
        step = self.step
        with module_calls.thread_state.observed_by(tape):
            tape.enter("")
            try:
                with _Call(self, len(step.shapes) - 1):
                    yield
            finally:
                tape.leave()
                if step is self.step and step.spoiled:
                    self._leave_plan(failed=True)
                elif step is not self.step and isinstance(tape, Tape):  # the step was put away meanwhile
                    tape.leave_region(failed=True)

    def note_failed_call(self, error: BaseException) -> None:
        """A call of the model has raised."""
        if is_out_of_memory(error) and not self.recovers:
            self._add_note_of_what_held(error)
            self.lower_budget(error)

    def _go_online(self, last_op: int) -> OnlineTape | None:
        """The step runs other ops than its plan after ``last_op``: the rest of it is online."""
        planned, model = self.step.planned, self._model()
        assert planned is not None and model is not None
        there = planned.graph.resident["batch"] + planned.made_bytes_after(last_op)
        try:
            self._open_watch(OnlineTape, model, (), unseen_bytes=there)
        except Exception as error:  # the step goes on without us
            self._fail(error)
        return self.step.watch

    def _open_watch(self, kind: type[OnlineTape], model: nn.Module, batch: object, unseen_bytes: int = 0) -> None:
        watch = kind(model, self._budget.for_step(model, batch), self._expected, self._known_calls)
        self.step.watch = watch
        watch.begin_step(unseen_bytes)
        self.step.seam = self._seams.open(watch)

    def _leave_plan(self, *, failed: bool = False) -> None:
        """A plan that was in place from the model's call on goes: backward begins, or another step.

        Args:
            failed: Neither does. What the plan has beyond this did not run, and that is no other step than planned.
        """
        seam, self.step.plan_seam = self.step.plan_seam, None
        if seam is not None:
            self._seams.close(seam)
            if self.step.planned is not None:
                self.step.planned.tape.leave_region(failed=failed)

    # -- regions of the training loop -----------------------------------------------------------------------

    @contextmanager
    def in_region(self, end_part: Callable[[], None]) -> Iterator[None]:
        """A region is open; ``end_part`` is called where a backward begins inside."""
        if self._end_part is not None:
            raise LowtideError("step_region() is open already: one step at a time.")
        self._end_part = end_part
        try:
            yield
        finally:
            self._end_part = None

    def note_region(self) -> None:
        """A region's part of the step has run forward; what holds its graph is not known."""
        self.step.graphs.append(lambda: True)

    def begin_uncalled(self, planned: PlannedStep) -> None:
        """A step begins under a plan that a rehearsal made, and will not call the model itself."""
        self.step = RunningStep(threading.current_thread())
        self.step.begin_under(planned)
        self.memory.begin_step(planned)

    # -- a step begins --------------------------------------------------------------------------------------

    def _begin_step(self, model: nn.Module, shape: CallShape, batch: object) -> None:
        thread = threading.current_thread()
        around = [other for other in self._all if other.step.is_on(thread)]
        for other in around:
            other._reasons.note(_STEPS_INSIDE)
            other.step.is_shared = True
        step = self.step = RunningStep(thread)
        step.is_shared = bool(around)
        step.has_gradients, step.trained = self._past.has_gradients(), self._past.trained_since()
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
        self._open_watch(WatchedStep if wants_graph else OnlineTape, model, batch)

    def replace_checkpointing(self) -> bool:
        """Switch the model's own off. False: not yet.

        As long as nobody knows what a step may take, it might not fit without.
        """
        waits = self._budget.absolute_bytes is None and self._budget.first_bytes is None
        if waits and self.checkpointing.will_be_replaced:
            return False
        self.checkpointing.switch_off()
        return True

    # -- backward -------------------------------------------------------------------------------------------

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes inside are none of the training's."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def before_backward(self, roots: Iterable[Any], *, creates: bool) -> None:
        if self._paused:
            return
        try:
            if not creates:
                if self._end_part is not None:
                    self._end_part()
                if self.step.plan_seam is not None and self._runs_through(roots):  # not another model's
                    self._leave_plan()
            self._suspend(roots)
        except Exception as own:
            self._fail(own)
        self._past.before_backward()
        if self.plans_by_shape.is_sharded and self.step.watch is not None:
            # Parameters are gathered and freed in backward, too.
            module_calls.thread_state.observer = self.step.watch

    def after_backward(
        self, roots: Iterable[Any], error: BaseException | None, *, retains: bool, creates: bool
    ) -> None:
        if self._paused:
            return
        step = self.step
        if self.plans_by_shape.is_sharded and module_calls.thread_state.observer is step.watch:
            module_calls.thread_state.observer = None
        try:
            self._put_back()
            moved = self._past.gradients_moved()
            if step.has_begun:
                if moved or self.plans_by_shape.is_sharded or self._past.trains(roots):
                    step.note_calls_reached(roots)
                    self._after_backward_of_step(error, retains, creates)
                else:
                    step.is_shared = True
            elif moved and not self._awaited:
                self._past.note_unseen_step()
            elif moved:
                self._awaited += retains - 1
            else:
                self._past.note_backward_of_others()
        except Exception as own:
            self._fail(own)

    def _after_backward_of_step(self, error: BaseException | None, retains: bool, creates: bool) -> None:
        """A backward of the present step has ended, or failed."""
        step = self.step
        step.spoiled |= error is not None
        if isinstance(step.watch, WatchedStep) and (model := self._model()) is not None:
            step.watch.note_backward(model)
        if error is not None and is_out_of_memory(error):
            if self.recovers:
                return
            self._add_note_of_what_held(error)
            self.lower_budget(error)
        if creates and error is None:  # part of a loss: its own backward is to come
            return
        step.note_backward(retains=retains)
        if step.thread is not threading.current_thread():
            step.phase, step.spoiled = Phase.OVER, True
            if step.watch is not None:
                self._say("backward runs on another thread than the forward pass: no plan comes of such steps")
        elif not step.is_claimed:
            self._end_step()
            self._awaited = min(_MOST_AWAITED, self._awaited + retains)

    def _runs_through(self, roots: Iterable[Any]) -> bool:
        """Whether a backward from ``roots`` runs through calls of the present step. Each thread numbers its nodes."""
        step = self.step
        return step.is_reached(roots) and (step.thread is threading.current_thread() or self._past.trains(roots))

    def _suspend(self, roots: Iterable[Any]) -> None:
        """Until a backward of another model's has ended, the watch is away: those ops are not of this step."""
        seam, roots = self.step.seam, list(roots)
        if seam is None or not seam.is_here or self.plans_by_shape.is_sharded:
            return
        # By its nodes too: a call that is checkpointed shows no leaves.
        if not (self.step.is_reached(roots) or self._past.trains(roots)):
            away = self._suspended_in_backward[threading.get_ident()] = ExitStack()
            away.enter_context(seam.suspended())

    def _put_back(self) -> None:
        """See ``_suspend``."""
        if (away := self._suspended_in_backward.pop(threading.get_ident(), None)) is not None:
            away.close()

    # -- a step ends ----------------------------------------------------------------------------------------

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
        if planned is not None:
            counters.why_not_planned = _RAN_OTHER_OPS if self._has_left_plan(step, planned) else ""
        counters.planned_steps += not counters.why_not_planned
        counters.planned_calls += step.planned_calls
        self._awaited = min(_MOST_AWAITED, self._awaited + max(0, len(step.shapes) - 1))
        if watch is not None:
            self._end_watch(step, watch, is_whole=not step.spoiled)
            self.memory.note_watched()
        # Of more calls than planned, as in a pipeline, each holds what its plan knows: none of them is judged alone.
        ran_plan = not counters.why_not_planned and (planned is None or len(step.shapes) == len(planned.shapes))
        peak = self.memory.end_step(
            planned, ran_plan=ran_plan, beside_bytes=self._expected.inputs_bytes or 0, is_shared=step.is_shared
        )
        if peak is None or step.spoiled or step.is_shared:
            return
        if planned is None and step.runs_own_checkpointing:
            self._budget.first_bytes = peak
        elif planned is None and step.has_budget:
            self.plans_by_shape.note_unplanned(step.shapes[0], peak, step_ms)
        elif ran_plan and planned is not None and planned.shapes and not planned.tape.proved:
            self.memory.judge_planned(planned, peak)

    def _has_left_plan(self, step: RunningStep, planned: PlannedStep) -> bool:
        """Whether a step that is over ran other ops than ``planned``, under which it began."""
        planned.tape.on_divergence = None  # it refers to us
        diverged = step.watch is not None
        if not planned.shapes:
            return diverged
        if not diverged and planned.makes_other_nodes(step.made_nodes):
            diverged = True
            self._say(_RAN_OTHER_OPS_UNSEEN)
        if not diverged and step.has_more_calls:
            diverged = True
            self._say(
                f"a step ran {len(step.shapes)} calls of the model, and its plan is for {len(planned.shapes)}: it "
                "may have taken more than the budget, and is planned again"
            )
        self.plans_by_shape.note_step(planned, step.made_nodes, diverged=diverged)
        return diverged

    def _end_watch(self, step: RunningStep, watch: OnlineTape, *, is_whole: bool) -> None:
        """What watched a step is done; ``is_whole``: with all of the step, and a plan is wanted for it."""
        watch.end_step()
        self.memory.note_peak(watch)
        self.recorded.tell(watch)
        if is_whole and step.shapes and isinstance(watch, WatchedStep):
            self.recorded.add(step, watch)

    def _put_away(self, *, failed: bool = False) -> RunningStep:
        """The present step is no more, and nothing of it is in place; see ``_leave_plan``."""
        is_called = self.step.phase is Phase.FORWARD
        if not is_called:  # else the call goes on, and leaves the plan's region when it returns
            self._leave_plan(failed=failed or self.step.spoiled)
        step, self.step = self.step, RunningStep()
        for seam in step.seams:
            self._seams.close(seam)
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

    def _fail(self, error: Exception) -> None:
        """An error of our own: the step goes on without us."""
        self.counters.why_not_planned = "an error of lowtide's own"
        self._awaited += bool(self.step.shapes)  # the step's backward
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
            self._fail(own)
            return None

    def what_held(self) -> str:
        """What the present step holds, by module, for whoever reads the error that ended it; "" if nobody knows."""
        try:
            return self.memory.what_held(self.step)
        except Exception as own:
            self._fail(own)
            return ""

    def _add_note_of_what_held(self, error: BaseException) -> None:
        if held := self.what_held():
            error.add_note(held)

    def spare_bytes(self) -> int:
        """What the present step leaves of the budget, as far as a plan says."""
        return self.memory.spare_bytes(self.step.planned)


class _Call:
    """Surrounds a call of the model: its ``region``, if it has one of its own, and the nodes that autograd makes."""

    __slots__ = ("_first_node", "_lifecycle", "_position", "_region", "_thrown_away")

    def __init__(self, lifecycle: Lifecycle, position: int, region: attach.TapedRegion | None = None) -> None:
        self._lifecycle, self._position, self._region = lifecycle, position, region

    def __enter__(self) -> None:
        module_calls.thread_state.fitted_calls += 1
        self._lifecycle.step.begin_call()
        self._first_node, self._thrown_away = num_nodes(), whole_modules.num_nodes_thrown_away()
        if self._region is not None:
            self._region.__enter__()

    def __exit__(self, failure: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._region is not None:
            self._region.__exit__(failure)
        module_calls.thread_state.fitted_calls -= 1
        thrown_away = whole_modules.num_nodes_thrown_away() - self._thrown_away
        nodes = range(self._first_node, num_nodes())
        self._lifecycle.step.end_call(self._position, nodes, thrown_away, failed=error is not None)
        if error is not None:
            self._lifecycle.note_failed_call(error)
