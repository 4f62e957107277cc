"""What stands in for the model's own call while it is fitted, and sees backward: it tells the lifecycle, and tapes."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lowtide.device import planned_ops
from lowtide.device.out_of_memory import is_out_of_memory
from lowtide.device.streams import is_captured
from lowtide.errors import LowtideError
from lowtide.options import FitOptions
from lowtide.shapes.call_shapes import CallShape, shape_of_call
from lowtide.step import module_calls, whole_modules
from lowtide.step.backward_entry import in_last_backward, num_nodes
from lowtide.step.other_hooks import hooks_of_others
from lowtide.tape import attach
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.program import TapedCall
from lowtide.tape.tape import Tape
from lowtide.tracing.model_facts import ModelFacts, device_of
from lowtide.training.after_step import AfterStep
from lowtide.training.budget import StepBudget
from lowtide.training.call_marks import marks_in
from lowtide.training.lifecycle import Lifecycle
from lowtide.training.notices import Notices
from lowtide.training.running_step import Phase, RunningStep


class FittedCall:
    """A model's own call, and an observer of backward.

    Attributes:
        options: What ``fit`` was asked for.
        counters: What went by so far.
    """

    lowtide = True  # how ``check_supported`` knows a fitted model

    def __init__(
        self, facts: ModelFacts, options: FitOptions, lifecycle: Lifecycle, budget: StepBudget, reasons: Notices
    ) -> None:
        self._model, self._lifecycle, self._reasons = weakref.ref(facts.model), lifecycle, reasons
        self.options, self.counters = options, lifecycle.counters
        self._device = device_of(facts.model)
        self._compiled = module_calls.CompiledCall(facts.model, "") if "" in facts.compiled else None
        self.before = None if self._compiled is None else self._compiled.before
        self._suspended_in_backward: dict[int, ExitStack] = {}  # by thread: what is away until its backward ends
        self._in_backward_of: RunningStep | None = None  # the present backward
        self._end_part: Callable[[], None] | None = None  # of the region that is open
        self._paused = False
        self._after_step = AfterStep(options, lifecycle, budget, reasons)

    @property
    def _step(self) -> RunningStep:
        return self._lifecycle.step

    # -- calls of the model ---------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None  # it is being called
        call = self._compiled or model._call_impl
        observer = module_calls.thread_state.observer
        if observer is not None:
            return attach.call_in_open_region(observer, call, args, kwargs)
        with self._lifecycle.seams.others_suspended(), self.around(model, args, kwargs):
            output = call(*args, **kwargs)
            if self._step.phase is Phase.FORWARD:
                self._step.graphs += marks_in(output)
                self._lifecycle.memory.note_returned(output, (args, kwargs))
            return output

    def around(self, model: nn.Module, args: tuple, kwargs: dict) -> AbstractContextManager[None]:
        """What surrounds a call of the model, or a region that counts as one."""
        lifecycle = self._lifecycle
        if attach.cannot_tape():
            lifecycle.past.note_untaped_call()
            return nullcontext()
        if not torch.is_grad_enabled():
            if self._step.takes_in_call_without_gradients():
                return nullcontext()
            return lifecycle.seams.suspended(self._step.seams)
        if is_captured(self._device):
            lifecycle.past.note_captured_call()
            return lifecycle.seams.suspended(self._step.seams)
        if self._step is self._in_backward_of and in_last_backward():
            return nullcontext()  # a checkpoint around the model runs it again: the step's backward takes that
        if not lifecycle.is_open_to(threading.current_thread()):
            self._reasons.say("the model was called on two threads at once: only one is planned")
            return nullcontext()
        if self._step.phase is Phase.FORWARD:  # nobody observes the calls inside, or they would have told
            return nullcontext()
        self.counters.calls += 1
        if in_last_backward() and not self._step.has_begun:
            lifecycle.past.note_call_in_backward()
        lifecycle.past.note_call()
        lifecycle.settle()
        self._after_step.speak()  # of a step that nobody knew to be over when its backward ended
        try:
            return self._around(model, shape_of_call(model, args, kwargs), args, kwargs)
        except Exception as error:  # nothing of ours may end the training
            lifecycle.fail(error)
            return nullcontext()

    def _around(self, model: nn.Module, shape: CallShape, args: tuple, kwargs: dict) -> AbstractContextManager[None]:
        """What surrounds this call: a planned tape, or the watch."""
        step = self._lifecycle.add_call(model, shape, args, kwargs)
        if step.runs_plan:
            return self._planned(step)
        if step.watch is None:
            return _Call(self._lifecycle, step.position)
        if step.recording is not None:
            step.recording.begin_call(model, args, kwargs)
        return self._observed(step.watch)

    def _planned(self, step: RunningStep) -> AbstractContextManager[None]:
        """A call under a plan."""
        lifecycle, planned, position, shape = self._lifecycle, step.planned, step.position, step.shapes[-1]
        assert planned is not None
        self._reasons.say_other_hooks(".".join(hooks_of_others()).strip("."))
        if why := planned_ops.why_missing():
            self._reasons.note(f"ops of a plan with nothing to be done run through Python, 15 us each: {why}")
        at = position % len(planned.shapes)  # calls whose backward never came may be among them
        tape = planned.tape
        if planned.shapes[at] != shape:
            if not planned.serves(at, shape):
                watch = lifecycle.go_online(planned.last_op_before(position))
                return _Call(lifecycle, position) if watch is None else self._observed(watch)
            tape.sizes_vary = planned.shapes[at].sizes != shape.sizes
        if not planned.is_known:
            tape.matches_all = True  # nobody has seen a real step under it
        step.planned_calls += 1
        tape.on_divergence = lifecycle.go_online
        tape.planned_bytes = None
        if position < len(planned.shapes) and not (step.is_shared or lifecycle.plans_by_shape.is_sharded):
            tape.planned_bytes = lifecycle.memory.planned_bytes(planned)
        if planned.keeps_everything and not tape.matches_all and tape.planned_bytes is None:
            return _Call(lifecycle, position)
        if planned.needs_whole_step:
            if at == 0:
                lifecycle.put_in_place(planned)
        else:
            call = planned.calls[at] if at < len(planned.calls) else TapedCall()
            return _Call(lifecycle, position, attach.TapedRegion(tape, call, whole_step=False))
        return self._observed(tape)

    @contextmanager
    def _observed(self, tape: Tape | OnlineTape) -> Iterator[None]:
        """The model's call inside a step that is taped as a whole."""
        step = self._step
        with module_calls.thread_state.observed_by(tape):
            tape.enter("")
            try:
                with _Call(self._lifecycle, step.position):
                    yield
            finally:
                tape.leave()
                if step is self._step and step.spoiled:
                    self._lifecycle.leave_plan(failed=True)
                elif step is not self._step and isinstance(tape, Tape):  # the step was put away meanwhile
                    tape.leave_region(failed=True)

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
        self._step.graphs.append(lambda: True)

    # -- backward -------------------------------------------------------------------------------------------

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is none of the training's, also where something still holds the last step's graph."""
        before, self._paused = self._paused, True
        try:
            with self._lifecycle.seams.suspended(self._step.seams):
                yield
        finally:
            self._paused = before

    def before_backward(self, roots: Iterable[Any], *, creates: bool) -> None:
        if self._paused or is_captured(self._device):
            return
        lifecycle, step = self._lifecycle, self._step
        self._in_backward_of = step if step.has_begun else None
        try:
            if not creates:
                lifecycle.begin_backward()
                if self._end_part is not None:
                    self._end_part()
                if step.plan_seam is not None and self._runs_through(roots):  # not another model's
                    lifecycle.leave_plan()
            self._suspend(roots)
        except Exception as own:
            lifecycle.fail(own)
        lifecycle.past.before_backward()
        if lifecycle.plans_by_shape.is_sharded and (watch := self._step.watch) is not None:
            # Parameters are gathered and freed in backward, too.
            module_calls.thread_state.observer = watch

    def after_backward(
        self, roots: Iterable[Any], error: BaseException | None, *, retains: bool, creates: bool
    ) -> None:
        if self._paused or is_captured(self._device):
            return
        lifecycle, step = self._lifecycle, self._step
        self._in_backward_of = None
        if lifecycle.plans_by_shape.is_sharded and module_calls.thread_state.observer is step.watch:
            module_calls.thread_state.observer = None
        try:
            self._put_back()
            moved = lifecycle.past.gradients_moved()
            if step.has_begun:
                if moved or lifecycle.plans_by_shape.is_sharded or lifecycle.past.trains(roots):
                    if not creates:
                        step.note_calls_reached(roots)
                    lifecycle.end_backward(error, retains=retains, creates=creates)
                else:
                    step.is_shared = True
            elif moved and not lifecycle.awaited:
                lifecycle.past.note_unseen_step(self)
            elif moved:
                lifecycle.awaited += retains - 1
            else:
                lifecycle.past.note_backward_of_others()
        except Exception as own:
            lifecycle.fail(own)

    def backward_returns(self) -> None:
        if not self._paused:
            self._after_step.speak()

    def _runs_through(self, roots: Iterable[Any]) -> bool:
        """Whether a backward from ``roots`` runs through calls of the present step. Each thread numbers its nodes."""
        step = self._step
        return step.is_reached(roots) and (
            step.thread is threading.current_thread() or self._lifecycle.past.trains(roots)
        )

    def _suspend(self, roots: Iterable[Any]) -> None:
        """Until a backward of another model's has ended, the watch is away: those ops are not of this step."""
        seam, roots = self._step.seam, list(roots)
        if seam is None or not seam.is_here or self._lifecycle.plans_by_shape.is_sharded:
            return
        # By its nodes too: a call that is checkpointed shows no leaves.
        if not (self._step.is_reached(roots) or self._lifecycle.past.trains(roots)):
            away = self._suspended_in_backward[threading.get_ident()] = ExitStack()
            away.enter_context(seam.suspended())

    def _put_back(self) -> None:
        """See ``_suspend``."""
        if (away := self._suspended_in_backward.pop(threading.get_ident(), None)) is not None:
            away.close()


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
        if error is not None and is_out_of_memory(error) and not self._lifecycle.recovers:
            self._lifecycle.note_out_of_memory(error)
