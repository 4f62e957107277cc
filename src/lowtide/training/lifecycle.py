"""Watches the steps of one model: which calls run under a plan, which are watched, and when a step is over.

    call of the model -> a plan for its shape?  yes: its tape, around this call; or, if it drops something outside the
                                                     model's calls, from here to the start of the backward that follows
                                                no:  an online tape, from here to the end of the backward that follows
    another op than planned -> an online tape from there on, in what the plan's part of the step leaves of the budget
    end of a backward -> the step is over: a recorded graph goes to the planner
    next step's first call -> plans that have come back are put in force

Nothing here raises into the training loop: an error of lowtide's own becomes a reason, and the step is saved as it is.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from lowtide.device.names import is_accelerator
from lowtide.device.out_of_memory import is_out_of_memory
from lowtide.device.streams import synchronize
from lowtide.errors import LowtideError, ReplayError
from lowtide.graph.step_graph import StepGraph
from lowtide.options import FitOptions
from lowtide.planning.planner_process import PlannerProcess
from lowtide.shapes.call_shapes import CallShape, shape_of_call
from lowtide.step import module_calls, whole_modules
from lowtide.step.autograd_leaves import leaves_of
from lowtide.step.deepspeed_engines import is_partitioned
from lowtide.step.kinds_of_calls import ANEW
from lowtide.step.other_hooks import hooks_of_others
from lowtide.step.sharding.units import is_gathered_once
from lowtide.step.sharding.zero3 import order_is_known
from lowtide.step.subclasses import wrapped_parameters
from lowtide.tape import attach
from lowtide.tape.online.online_calls import KnownCalls
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.online.room import ExpectedBytes
from lowtide.tape.program import TapedCall
from lowtide.tape.tape import Tape
from lowtide.tracing.model_facts import ModelFacts
from lowtide.training.budget import StepBudget
from lowtide.training.call_marks import calls_reached, marks_in, reaches_any
from lowtide.training.existing_checkpointing import ExistingCheckpointing
from lowtide.training.notices import Notices
from lowtide.training.past_training import PastTraining
from lowtide.training.planned_step import PlannedStep, num_nodes
from lowtide.training.plans_by_shape import PlansByShape
from lowtide.training.seam import Seam, others_suspended
from lowtide.training.shared_tiers import SharedTiers
from lowtide.training.status import Counters
from lowtide.training.step_memory import StepMemory
from lowtide.training.watched_step import WatchedStep, costs_of
from lowtide.training.watched_times import WatchedTimes
from lowtide.units import format_bytes

_MOST_AWAITED = 16  # calls of a step whose backward may come apart: for so many backward passes nothing is told
_MOST_FOUND_UNSETTLED = 2  # then what is not optimized is not called, perhaps
_MOST_FOUND_GATHERED = 3  # then an evaluation comes before every step, perhaps
_STEPS_INSIDE = (
    "another fitted model's steps begin between this one's forward and backward: what that model holds meanwhile is in "
    "its budget alone. Both together take up to the sum"
)
_OWN_CHECKPOINTING = (
    "the first step ran with the model's own checkpointing, as it would without lowtide: a percentage is of the step "
    "without it, which the next step's ops tell"
)
_RAN_OTHER_OPS = "the last step ran other ops than its plan"


class Lifecycle:
    """The model's own call, and an observer of backward.

    Attributes:
        options: What ``fit`` was asked for.
        plans_by_shape: The plans at hand.
        counters: What went by so far.
        memory: What steps may take, and took.
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
        self.plans_by_shape = PlansByShape(facts, options, planner, tiers, reasons)
        self._was_sharded = self.plans_by_shape.is_sharded
        self._last: PlannedStep | None = None  # that was in force
        self.counters = Counters()
        self.recovers = False
        self.memory = StepMemory(budget, self.plans_by_shape, self.counters, reasons)
        self.checkpointing = ExistingCheckpointing(model, self._say, options.checkpointing)
        self._thread: threading.Thread | None = None  # that runs the present step
        self._shapes: list[CallShape] = []  # of the calls since the last backward
        self._planned_calls = 0  # of these
        self._has_gradients = False  # before the present step: it adds to them
        self._trained = ""  # which parameters it trains, if not those of the first
        self._awaited = 0  # more backward passes that may come of earlier calls, as in a pipeline
        self._step: PlannedStep | None = None  # in force in the present step
        self._watch: OnlineTape | None = None
        self._is_own = False  # the present step runs as the model is, its own checkpointing included
        self._kept_budget = False  # the present step has one: no percentage that waits for it
        self._began_s = 0.0  # when it began
        self._is_shared = False  # another model's step or backward runs in it: what that takes is counted too
        self._expected = ExpectedBytes()
        self._known_calls = KnownCalls()
        self._seam: Seam | None = None  # of the watch
        self._suspended_in_backward: dict[int, ExitStack] = {}  # by thread: what is away until its backward ends
        self._plan_seam: Seam | None = None  # of a plan that drops something outside the model's calls
        self._is_called = False  # the model runs, as part of the present step
        self._end_part: Callable[[], None] | None = None  # of the region that is open
        self._spoiled = False  # the step failed, or mixes with another: no plan comes of it
        # Of the present step, though something still holds its graph:
        self._num_backwards = 0  # that ran
        self._ended_well = True  # the step before
        self._retained = self._ended_elsewhere = False  # the graph of one; the last one ran on another thread
        self._seams_elsewhere: list[Seam] = []  # of steps that are over, in place on threads that are not this one
        self._found_unsettled = 0  # likewise, since scripted code had not been optimized
        self._found_gathered = 0  # watched steps that no plan came of, since ZeRO-3 had gathered parameters before
        self._told_crossing = False
        self._why_no_plan = ""  # for the present step, where there is none
        self._open_seams: list[Seam] = []
        # A model that is dropped in the middle of a step leaves nothing that sees the next model's ops.
        weakref.finalize(model, _close_all, self._open_seams).atexit = False
        self._nodes: dict[int, range] = {}  # of autograd, made by each call of the present step
        self._thrown_away: dict[int, int] = {}  # how many of these are of graphs that were thrown away
        self._graphs: list[Callable[[], object]] = []  # of what its calls returned: None once one is gone
        self._more_calls = False  # than planned
        self._past = PastTraining(model, self, self.counters, reasons)
        self._paused = False
        self._unread: list[_Recorded] = []  # the device has not passed all of their ops yet
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
        with others_suspended(self._open_seams), self.around(model, args, kwargs):
            output = call(*args, **kwargs)
            if self._is_called:
                self._graphs += marks_in(output)
            return output

    def around(self, model: nn.Module, args: tuple, kwargs: dict) -> AbstractContextManager[None]:
        """What surrounds a call of the model, or a region that counts as one."""
        if attach.cannot_tape():
            self._past.note_untaped_call()
            return nullcontext()
        if not torch.is_grad_enabled():
            return self._suspended()
        if not self._is_ours(threading.current_thread()):
            self._say("the model was called on two threads at once: only one is planned")
            return nullcontext()
        if self._is_called:  # and keeps everything, so nobody observes the calls inside
            return nullcontext()
        self._thread = threading.current_thread()
        self.counters.calls += 1
        self._past.note_call()
        try:
            return self._around(model, shape_of_call(model, args, kwargs), args, kwargs)
        except Exception as error:  # nothing of ours may end the training
            self._fail(error)
            return nullcontext()

    def _is_ours(self, thread: threading.Thread) -> bool:
        """Whether a call on ``thread`` may be part of a step; a step that another thread has left behind ends here."""
        for seam in self._seams_elsewhere:
            seam.close()  # what another step has left on this thread
        self._seams_elsewhere = [seam for seam in self._seams_elsewhere if seam.is_elsewhere]
        owner = self._thread
        if owner is None or owner is thread:
            return True
        if self._ended_elsewhere:
            self._end_step()
        elif not owner.is_alive():  # nobody can go on with its forward pass
            self.abandon_step()
        return self._thread is None

    def _around(self, model: nn.Module, shape: CallShape, args: tuple, kwargs: dict) -> AbstractContextManager[None]:
        """What surrounds this call: a planned tape, or the watch."""
        if self._shapes and self._is_over():
            self._end_step()
            self._thread = threading.current_thread()
        if self._step is not None and self._watch is None and len(self._shapes) == len(self._step.shapes):
            self._note_call_too_many()
        if self._has_failed() or (self._watch is not None and self._step is None and self._watch.num_claims == 0):
            # A call has failed, or nobody has run backward of the calls so far and nobody can any more: no step.
            self._shapes = []
        begins = not self._shapes
        if begins:
            self._has_gradients, self._trained = self._past.has_gradients(), self._past.trained_since()
        shape = shape.of_training(self._trained) if self._trained else shape
        shape = shape.with_gradients() if self._has_gradients else shape
        if begins:
            self._begin_step(model, shape, (args, kwargs))
        position = len(self._shapes)
        self._shapes.append(shape)
        if self._step is not None and self._watch is None:
            return self._planned(self._step, position, shape)
        if self._watch is None:
            return _Call(self, position)
        if isinstance(self._watch, WatchedStep):
            self._watch.begin_call(model, args, kwargs)
        return self._observed(self._watch)

    def _has_failed(self) -> bool:
        """Whether a call of the present step has, and with it what observed the step as a whole."""
        step = self._step
        return self._spoiled and (self._watch is not None or (step is not None and step.needs_whole_step))

    def _note_call_too_many(self) -> None:
        """A call beyond those planned: if nothing is left of those, another step begins."""
        if all(mark() is None for mark in self._graphs):
            self._leave_plan()
            self._shapes = []

    def _has_more_calls_than_planned(self, roots: Iterable[Any]) -> bool:
        """Whether one backward is of more calls than its plan; in a pipeline each call has its own."""
        step = self._step
        if step is None or self._watch is not None or not 0 < len(step.shapes) < len(self._shapes):
            return False
        return len(calls_reached(roots, self._nodes)) > len(step.shapes)

    def _planned(self, step: PlannedStep, position: int, shape: CallShape) -> AbstractContextManager[None]:
        """A call under a plan, the one at ``position`` of the step."""
        self._reasons.say_other_hooks(".".join(hooks_of_others()).strip("."))
        at = position % len(step.shapes)  # calls whose backward never came may be among them
        tape = step.tape
        if step.shapes[at] != shape:
            if not step.serves(at, shape):
                watch = self._go_online(step.last_op_before(position))
                return _Call(self, position) if watch is None else self._observed(watch)
            tape.sizes_vary = step.shapes[at].sizes != shape.sizes
        if not step.is_known:
            tape.matches_all = True  # nobody has seen a real step under it
        self._planned_calls += 1
        tape.on_divergence = self._go_online
        if step.keeps_everything and not tape.matches_all:
            return _Call(self, position)
        if step.needs_whole_step:
            if at == 0:
                self._leave_plan()
                self._plan_seam = self._opened(tape)
                tape.enter_step()
        else:
            call = step.calls[at] if at < len(step.calls) else TapedCall()
            return _Call(self, position, attach.TapedRegion(tape, call, whole_step=False))
        return self._observed(tape)

    @contextmanager
    def _observed(self, tape: Tape | OnlineTape) -> Iterator[None]:
        """The model's call inside a step that is taped as a whole."""
        state = module_calls.thread_state
        state.observer = tape
        tape.enter("")
        try:
            with _Call(self, len(self._shapes) - 1):
                yield
        finally:
            tape.leave()
            state.observer = None
            if self._spoiled:
                self._leave_plan(failed=True)

    def begin_call(self) -> None:
        """The model runs: calls of it in this one are part of it."""
        self._is_called = True

    def end_call(self, position: int, nodes: range, num_thrown_away: int, error: BaseException | None) -> None:
        """The step's call at ``position`` is over, and made these nodes of autograd, some in runs of modules again."""
        self._is_called = False
        if error is None:
            self._nodes[position], self._thrown_away[position] = nodes, num_thrown_away
            return
        self._spoiled = True
        if is_out_of_memory(error) and not self.recovers:
            self._add_note_of_what_held(error)
            self.lower_budget(error)

    @property
    def _made_nodes(self) -> dict[int, int]:
        return {position: len(nodes) - self._thrown_away[position] for position, nodes in self._nodes.items()}

    def _go_online(self, last_op: int) -> OnlineTape | None:
        """The step runs other ops than its plan after ``last_op``: the rest of it is online."""
        step, model = self._step, self._model()
        assert step is not None and model is not None
        there = step.graph.resident["batch"] + step.made_bytes_after(last_op)
        try:
            self._open_watch(OnlineTape, model, (), unseen_bytes=there)
        except Exception as error:  # the step goes on without us
            self._fail(error)
        return self._watch

    def _leave_plan(self, *, failed: bool = False) -> None:
        """A plan that was in place from the model's call on goes: backward begins, or another step.

        Args:
            failed: Neither does. What the plan has beyond this did not run, and that is no other step than planned.
        """
        if self._plan_seam is not None:
            self._close_seam(self._plan_seam)
            self._plan_seam = None
            if self._step is not None:
                self._step.tape.leave_region(failed=failed)

    def _opened(self, tape: Tape | OnlineTape) -> Seam:
        seam = Seam(tape, (tape.pack, tape.unpack))
        seam.open()
        self._open_seams.append(seam)
        return seam

    def _close_seam(self, seam: Seam) -> None:
        """What another thread has in place goes when that thread calls the model next."""
        seam.close()
        self._open_seams.remove(seam)
        if seam.is_elsewhere:
            self._seams_elsewhere.append(seam)

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        """A pass without gradients is no part of the step: nothing is watched, what it leaves is counted."""
        with ExitStack() as away:
            for seam in (self._seam, self._plan_seam):
                if seam is not None and seam.is_here:
                    away.enter_context(seam.suspended())
            yield

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
        self._graphs.append(lambda: True)

    def begin_uncalled(self, step: PlannedStep) -> None:
        """A step begins under a plan that a rehearsal made, and will not call the model itself."""
        self._step, self._thread = step, threading.current_thread()
        self.memory.begin_step(step)

    # -- steps ----------------------------------------------------------------------------------------------

    def _begin_step(self, model: nn.Module, shape: CallShape, batch: object) -> None:
        if self._watch is not None:  # its backward never came, or somebody still holds its graph
            self._close_watch(())
        for other in self._all:
            if other._shapes and other._thread is self._thread:
                other._reasons.note(_STEPS_INSIDE)
                other._is_shared = True
        self.memory.follow_free_memory(model)
        self._is_own = not self.replace_checkpointing()
        self._kept_budget = self._budget.absolute_bytes is not None
        self._is_shared = any(other._shapes and other._thread is self._thread for other in self._all)
        self._began_s = time.perf_counter()
        self._step = None
        if sharded := self._sharded_since_fit(model):
            self.plans_by_shape.refuse(shape, sharded, saved=True)
            self._why_no_plan = sharded
            self.memory.begin_step(None)
            return
        if (changed := self.memory.look(model, batch)) and not self.plans_by_shape.is_sharded:
            self._unread.clear()
            self.plans_by_shape.start_afresh(*changed)
        self.request_plans()
        self._step = self._unless_outgrown(model, shape, self.plans_by_shape.plan_for(shape))
        self.memory.begin_step(self._step)
        self._why_no_plan = _OWN_CHECKPOINTING if self._is_own else self.plans_by_shape.why_no_plan(shape)
        self._spoiled, self._nodes, self._graphs = False, {}, []
        self._more_calls = False
        self._forget_backwards()
        if self._step is not None:
            self._last = self._step
            self._step.tape.sizes_vary = False
            return
        is_recorded = any(recorded.shapes[0] == shape for recorded in self._unread)
        kind = WatchedStep if self.plans_by_shape.wants_graph(shape) and not is_recorded else OnlineTape
        if self.plans_by_shape.is_sharded and not is_gathered_once(model):  # what a graph names is made in this step
            self._why_no_plan = "FSDP has not gathered every parameter yet: the next step is watched"
            kind = OnlineTape
        self._open_watch(kind, model, batch)

    def replace_checkpointing(self) -> bool:
        """Switch the model's own off. False: not yet.

        As long as nobody knows what a step may take, it might not fit without.
        """
        waits = self._budget.absolute_bytes is None and self._budget.first_bytes is None
        if waits and self.checkpointing.will_be_replaced:
            return False
        self.checkpointing.switch_off()
        return True

    def _unless_outgrown(self, model: nn.Module, shape: CallShape, step: PlannedStep | None) -> PlannedStep | None:
        """``step``, or its decisions with the optimizer's state as it is, or what was put aside before; None where it
        no longer fits beside what is there: then another is asked for.

        After a step that failed, or that ran no backward, its tensors may be there for a while: no reason.
        """

        def fits(other: PlannedStep) -> bool:
            within = other.plan.predicted_peak_bytes <= self._budget.limit_bytes
            return within and not self.memory.outgrown_bytes(model, other)

        found = self.plans_by_shape.best_that_fits(shape, step, fits) if self._ended_well else step
        if found is not None and found is not step:
            self._reasons.say_latest(
                "outgrown",
                "what is on the device before a step comes and goes: of two plans, a step runs under the one that fits",
            )
        step = found
        if step is not None and (change := self.memory.state_change_bytes(step)):
            self._budget.follow_state()
            step = self.plans_by_shape.correct_state(step, change, self._budget.limit_bytes)
        more = 0 if step is None or not self._ended_well else self.memory.outgrown_bytes(model, step)
        self._ended_well = False
        if step is None or not more:
            return step
        if step.plan.predicted_peak_bytes > self._budget.limit_bytes:
            # None is leaner, and steps without one are dearer.
            return self.plans_by_shape.keep_least(step, more)
        self._reasons.say_latest(
            "outgrown",
            f"{format_bytes(more)} more are on the device before a step than its plan knows, and the budget has no "
            "room for that: the plan was dropped, another is made. Pass optimizer= to fit, so that its state is known",
        )
        self.plans_by_shape.plan_anew(step, more, self._budget.limit_bytes)
        return None

    def _sharded_since_fit(self, model: nn.Module) -> str:
        """Why nothing is known any more of where the parameters are; "" as long as it is."""
        sampled = self._past.sampled
        if self._was_sharded:
            return ""
        if is_partitioned(p for p in sampled if p is not None):
            self.plans_by_shape.is_sharded = True
            return "DeepSpeed's ZeRO-3 has partitioned the model since fit. Fit it afterwards"
        if None in sampled and wrapped_parameters(model):
            self.plans_by_shape.is_sharded = True
            return "the model was sharded after fit. Fit it afterwards"
        return ""

    def _open_watch(self, kind: type[OnlineTape], model: nn.Module, batch: object, unseen_bytes: int = 0) -> None:
        self._watch = kind(model, self._budget.for_step(model, batch), self._expected, self._known_calls)
        self._watch.begin_step(unseen_bytes)
        self._seam = self._opened(self._watch)

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
                if self._plan_seam is not None and self._runs_through(roots):  # not another model's
                    self._leave_plan()
            self._suspend(roots)
        except Exception as own:
            self._fail(own)
        self._past.before_backward()
        if self.plans_by_shape.is_sharded and self._watch is not None:
            module_calls.thread_state.observer = self._watch  # parameters are gathered and freed in backward, too

    def after_backward(
        self, roots: Iterable[Any], error: BaseException | None, *, retains: bool, creates: bool
    ) -> None:
        if self._paused:
            return
        if self.plans_by_shape.is_sharded and module_calls.thread_state.observer is self._watch:
            module_calls.thread_state.observer = None
        try:
            self._put_back()
            moved = self._past.gradients_moved()
            if self._shapes or self._step is not None:
                if moved or self.plans_by_shape.is_sharded or self._trains(roots):
                    self._more_calls |= self._has_more_calls_than_planned(roots)
                    self._after_backward_of_step(error, retains, creates)
                else:
                    self._is_shared = True
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
        self._spoiled |= error is not None
        if isinstance(self._watch, WatchedStep) and (model := self._model()) is not None:
            self._watch.note_backward(model)
        if error is not None and is_out_of_memory(error):
            if self.recovers:
                return
            self._add_note_of_what_held(error)
            self.lower_budget(error)
        if creates and error is None:  # part of a loss: its own backward is to come
            return
        self._num_backwards += 1
        self._retained |= retains
        if self._thread is not threading.current_thread():
            self._ended_elsewhere = self._spoiled = True
            if self._watch is not None:
                self._say("backward runs on another thread than the forward pass: no plan comes of such steps")
        elif self._watch is None or self._watch.num_claims == 0:
            self._end_step()
            self._awaited = min(_MOST_AWAITED, self._awaited + retains)

    def _is_over(self) -> bool:
        """Whether the present step is, though its backward left something that is held. Asked when a call comes."""
        if self._ended_elsewhere:
            return True
        if self._watch is None or not self._num_backwards or self._spoiled:
            return False
        waiting = len(self._shapes) - self._num_backwards
        if waiting > _MOST_AWAITED:  # no pipeline is that deep
            self._spoiled = True
            self._say(
                "something holds on to the graphs of earlier steps (a loss or metric that was not detached), so it is "
                "not known where a step ends: they run online. Call .detach() or .item() on what you keep"
            )
            return True
        return self._watch.num_claims == 0 or self._retained or waiting <= 0

    def settle(self) -> None:
        """End the present step, if nothing holds its graph any more."""
        if self._thread is not threading.current_thread() or self._watch is None:
            return
        if self._num_backwards and not self._spoiled and self._watch.num_claims == 0:
            self._end_step()

    def _end_step(self) -> None:
        counters = self.counters
        self.memory.stop_counting()
        # A recorded step is dearer than others; a device's steps are not over yet.
        is_timed = type(self._watch) is OnlineTape and not is_accelerator(self._budget.device)
        step_ms = 1e3 * (time.perf_counter() - self._began_s) if is_timed else None
        self._ended_well = not self._spoiled
        counters.steps += 1
        step, diverged = self._step, self._watch is not None
        if step is not None:
            step.tape.on_divergence = None  # it refers to us
        if step is not None and step.shapes:
            if not diverged and step.makes_other_nodes(self._made_nodes):
                diverged = True
                self._say(
                    "a step ran other ops than its plan where that keeps everything, which shows only at the end: it "
                    "may have taken more than the budget. Ops of such plans are followed one by one from now on"
                )
            if not diverged and self._more_calls:
                diverged = True
                self._say(
                    f"a step ran {len(self._shapes)} calls of the model, and its plan is for {len(step.shapes)}: it "
                    "may have taken more than the budget, and is planned again"
                )
            self.plans_by_shape.note_step(step, self._made_nodes, diverged=diverged)
        counters.why_not_planned = _RAN_OTHER_OPS if diverged else ""
        if step is None:
            counters.why_not_planned = self._why_no_plan
        counters.plan_left_steps += step is not None and self._watch is not None
        counters.planned_steps += not counters.why_not_planned
        counters.planned_calls += self._planned_calls
        self._awaited = min(_MOST_AWAITED, self._awaited + max(0, len(self._shapes) - 1))
        shapes, self._shapes, self._planned_calls, self._thread = tuple(self._shapes), [], 0, None
        self._step = None
        self._forget_backwards()
        if self._watch is not None:
            self._close_watch(() if self._spoiled else shapes)
            self.memory.note_watched()
        # Of more calls than planned, as in a pipeline, each holds what its plan knows: none of them is judged alone.
        ran_plan = not counters.why_not_planned and (step is None or len(shapes) == len(step.shapes))
        peak = self.memory.end_step(
            step, ran_plan=ran_plan, beside_bytes=self._expected.inputs_bytes or 0, is_shared=self._is_shared
        )
        if peak is None or not self._ended_well or self._is_shared:
            return
        if step is None and self._is_own:
            self._budget.first_bytes = peak
        elif step is None and self._kept_budget:
            self.plans_by_shape.note_unplanned(shapes[0], peak, step_ms)
        elif ran_plan and step is not None and step.shapes and not step.tape.proved:
            self.memory.judge_planned(step, peak)

    def _forget_backwards(self) -> None:
        self._num_backwards, self._retained, self._ended_elsewhere = 0, False, False

    def _close_watch(self, shapes: tuple[CallShape, ...]) -> None:
        """The watched step is over; ``shapes`` are those of the calls of a whole step that a plan is wanted for."""
        watch, self._watch = self._watch, None
        seam, self._seam = self._seam, None
        model = self._model()
        assert watch is not None and seam is not None
        self._close_seam(seam)
        watch.end_step()
        self.memory.note_peak(watch)
        if watch.crossing_bytes and not self._told_crossing:
            self._told_crossing = True
            self._say(
                f"the model is sharded: {format_bytes(watch.crossing_bytes)} that its modules hand to one another are "
                "saved in each step, since each module's parameters are gathered for that module alone"
            )
        self._reasons.say_other_hooks(watch.other_hooks)
        for op in watch.releaser.differed:
            self._say(f"{op} gives other bits when it runs again: saved")
        for op in self._known_calls.proven_anew:
            self._say(f"{op} {ANEW}")
        if watch.problem:
            self._say(f"a step was saved whole: {watch.problem}")
        if model is None or not shapes or not isinstance(watch, WatchedStep) or watch.problem or self._is_own:
            return
        if watch.problem_of_recording:
            for op, why in self._known_calls.kept.items():  # else the graph tells
                self._say(f"{op} {why}: saved")
            self.plans_by_shape.refuse(shapes[0], watch.problem_of_recording)
            return
        if why := self._why_unlike_later_ones(watch, model):
            self.counters.why_not_planned = why
            return
        graph, costs = watch.graph_and_costs(model, self._budget.optimizers.all())
        if watch.checkpointed:
            self._reasons.say_checkpointed(watch.checkpointed, watch.share_run_again(graph, costs))
        self._reasons.say_of(graph)
        ran_plain = self._budget.absolute_bytes is None
        budget_bytes = self._budget.fixed_for(graph, costs)
        if ran_plain and self.memory.highest_peak_bytes > budget_bytes:
            how = "plain, since a percentage is of what it takes"
            if self._budget.first_bytes is not None:
                how = "with the model's own checkpointing, since a percentage is of a step without it"
            self._reasons.note(
                f"the first step ran {how}: the observed peak is that step's. A budget in bytes holds from the first "
                "step on"
            )
        if why := watch.times.why_of_launches(graph):
            self._reasons.note(why)
        flags, proven = watch.run_state.flags, watch.proven_ops
        self._unread.append(_Recorded(shapes, graph, watch.times, self._made_nodes, flags, proven))
        if not self._budget.optimizers.are_unknown:  # else the next step asks: its state is there then
            self.request_plans()

    def look_at_seals(self, *, waits: bool) -> None:
        """Tell of replays with other bits, as far as a device has said so: backward raises it, if one is to come."""
        planned = [*self.plans_by_shape.plans, *([self._last] if self._last is not None else [])]
        for seals in {id(p.tape): p.tape.seals for p in planned}.values():
            if seals is not None:
                try:
                    seals.settle() if waits else seals.look(waits=False)
                except ReplayError as error:
                    self._say(" ".join(str(error).split()))

    def request_plans(self, *, waits: bool = False) -> None:
        """Hand recorded steps to the planner once the times of their ops are known.

        Args:
            waits: Wait for the device, if they are not.
        """
        if waits and self._unread:
            synchronize(self._budget.device)
        for recorded in list(self._unread):
            if recorded.times.are_known():
                self._unread.remove(recorded)
                graph, costs = self._with_state(recorded.graph), costs_of(recorded.graph, recorded.times)
                self._budget.follow_state()
                self.plans_by_shape.request(
                    recorded.shapes, graph, costs, self._budget.fixed_for(graph, costs), recorded.made_nodes,
                    recorded.flags, recorded.proven_ops,
                )  # fmt: skip

    def _with_state(self, graph: StepGraph) -> StepGraph:
        """With what an optimizer that nobody had passed keeps, if it has stepped since ``graph`` was recorded."""
        if graph.resident["optimizer"] or not (state_bytes := self._budget.state_bytes()):
            return graph
        return replace(graph, resident={**graph.resident, "optimizer": state_bytes})

    def _why_unlike_later_ones(self, watch: WatchedStep, model: nn.Module) -> str:
        """Why later steps take other memory than was recorded; "" if they do not.

        ZeRO-3 gathers other parameters then, or a profiler hid what kernels take.
        """
        if watch.recorder.profiled:
            why = "a profiler was active, so what kernels take beside what they make was not measured"
            self._say(f"no plan comes of a step in which {why}: a step without a profiler is planned")
            return f"{why}: the next step is watched"
        if not order_is_known(model):
            return "DeepSpeed has not seen the order of the modules yet: the next step is watched"
        if watch.found_gathered and self._found_gathered < _MOST_FOUND_GATHERED:
            self._found_gathered += 1
            return "an evaluation before the last step had parameters gathered: the next step is watched"
        if watch.recorder.functions.found_unsettled and self._found_unsettled < _MOST_FOUND_UNSETTLED:
            self._found_unsettled += 1
            return "TorchScript optimizes scripted code after its first call: the next step is watched"
        return ""

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
            shape = self._shapes[0] if self._shapes else None
            return self.memory.lower(error, attempt, self._step, self._watch, shape)
        except Exception as own:
            self._fail(own)
            return None

    def what_held(self) -> str:
        """What the present step holds, by module, for whoever reads the error that ended it; "" if nobody knows."""
        try:
            return self.memory.what_held(self._step, self._watch)
        except Exception as own:
            self._fail(own)
            return ""

    def _add_note_of_what_held(self, error: BaseException) -> None:
        if held := self.what_held():
            error.add_note(held)

    def spare_bytes(self) -> int:
        """What the present step leaves of the budget, as far as a plan says."""
        return self.memory.spare_bytes(self._step)

    def abandon_step(self) -> None:
        """What has begun is no step: nobody runs its backward any more."""
        if self._watch is not None:
            self._close_watch(())
        self._leave_plan(failed=True)
        self._shapes, self._thread, self._step, self._planned_calls = [], None, None, 0
        self._forget_backwards()
        self.memory.forget_step()

    def _runs_through(self, roots: Iterable[Any]) -> bool:
        """Whether a backward from ``roots`` runs through calls of the present step. Each thread numbers its nodes."""
        return reaches_any(roots, self._nodes) and (self._thread is threading.current_thread() or self._trains(roots))

    def _suspend(self, roots: Iterable[Any]) -> None:
        """Until a backward of another model's has ended, the watch is away: those ops are not of this step."""
        seam, roots = self._seam, list(roots)
        if seam is None or not seam.is_here or self.plans_by_shape.is_sharded:
            return
        # By its nodes too: a call that is checkpointed shows no leaves.
        if not (reaches_any(roots, self._nodes) or self._trains(roots)):
            away = self._suspended_in_backward[threading.get_ident()] = ExitStack()
            away.enter_context(seam.suspended())

    def _put_back(self) -> None:
        """See ``_suspend``."""
        if (away := self._suspended_in_backward.pop(threading.get_ident(), None)) is not None:
            away.close()

    def _trains(self, roots: Iterable[Any]) -> bool:
        """Whether a backward from ``roots`` is one of this model."""
        model = self._model()
        if model is None:
            return False
        parameters = {id(p) for p in model.parameters()}
        return any(id(leaf) in parameters for leaf in leaves_of(roots))

    # -- what went wrong ------------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        """An error of our own: the step goes on without us."""
        self.counters.why_not_planned = "an error of lowtide's own"
        self._awaited += bool(self._shapes)  # the step's backward
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        self._say(f"an error of lowtide's own, the step is saved whole: {what}")
        self._shapes, self._thread, self._step, self._planned_calls = [], None, None, 0
        self._forget_backwards()
        for seam in (self._seam, self._plan_seam):
            if seam is not None:
                self._close_seam(seam)
        if self._watch is not None:
            self._watch.stop_observing()
        self._watch = self._seam = self._plan_seam = None
        self.memory.forget_step()

    def close(self) -> None:
        """Nothing is watched any more; a graph that is still there keeps its handles."""
        self.look_at_seals(waits=True)
        self.abandon_step()
        self._unread.clear()
        self.checkpointing.restore()


class _Recorded(NamedTuple):
    """A watched step that is over; see ``PlansByShape.request``."""

    shapes: tuple[CallShape, ...]
    graph: StepGraph
    times: WatchedTimes
    made_nodes: Mapping[int, int]
    flags: tuple
    proven_ops: frozenset[int]


class _Call:
    """Surrounds a call of the model: its ``region``, if it has one of its own, and the nodes that autograd makes."""

    __slots__ = ("_first_node", "_lifecycle", "_position", "_region", "_thrown_away")

    def __init__(self, lifecycle: Lifecycle, position: int, region: attach.TapedRegion | None = None) -> None:
        self._lifecycle, self._position, self._region = lifecycle, position, region

    def __enter__(self) -> None:
        module_calls.thread_state.fitted_calls += 1
        self._lifecycle.begin_call()
        self._first_node, self._thrown_away = num_nodes(), whole_modules.num_nodes_thrown_away()
        if self._region is not None:
            self._region.__enter__()

    def __exit__(self, failure: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._region is not None:
            self._region.__exit__(failure)
        module_calls.thread_state.fitted_calls -= 1
        thrown_away = whole_modules.num_nodes_thrown_away() - self._thrown_away
        self._lifecycle.end_call(self._position, range(self._first_node, num_nodes()), thrown_away, error)


def _close_all(seams: list[Seam]) -> None:
    for seam in seams:
        seam.close()
