"""Watches the steps of one model: which calls run under a plan, which are watched, and when a step is over.

    call of the model -> a plan for its shape?  yes: its tape, around this call
                                                no:  an online tape, from here to the end of the backward that follows
    another op than planned -> an online tape from there on, in what the plan's part of the step leaves of the budget
    end of a backward -> the step is over: a recorded graph goes to the planner
    next step's first call -> plans that have come back are put in force

Nothing here raises into the training loop: an error of lowtide's own becomes a reason, and the step is saved as it is.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide.options import FitOptions
from lowtide.runtime.budget import StepBudget, is_out_of_memory
from lowtide.runtime.call_shapes import CallShape, shape_of_call
from lowtide.runtime.existing_checkpointing import ExistingCheckpointing
from lowtide.runtime.plan_shelf import PlanShelf
from lowtide.runtime.planned_step import PlannedStep, num_nodes
from lowtide.runtime.planner_process import PlannerProcess
from lowtide.runtime.seam import Seam
from lowtide.runtime.watched_step import WatchedStep
from lowtide.tape import attach
from lowtide.tape.online.room import ExpectedBytes
from lowtide.tape.online.tape import OnlineTape
from lowtide.tape.program import TapedCall
from lowtide.tracing import module_calls
from lowtide.units import format_bytes

logger = logging.getLogger("lowtide")
_SAMPLED_PARAMETERS = 8  # whose gradients tell that somebody trains the model past us


@dataclass
class Counters:
    """What went by."""

    steps: int = 0
    planned_steps: int = 0
    calls: int = 0
    planned_calls: int = 0
    observed_peak_bytes: int | None = None
    last_step_planned: bool = False
    diverged_steps: int = 0  # begun under a plan, with other ops
    reasons: list[str] = field(default_factory=list)


class StepWatcher:
    """The model's own call, and an observer of backward.

    Attributes:
        shelf: The plans at hand.
        counters: What went by so far.
    """

    lowtide = True  # how ``check_supported`` knows a fitted model

    def __init__(self, model: nn.Module, options: FitOptions, budget: StepBudget, planner: PlannerProcess) -> None:
        self._compiled = module_calls.compiled_call_of(model)
        self.before = None if self._compiled is None else self._compiled.before
        self._call: Callable[..., Any] = self._compiled or model._call_impl
        self._model, self._options, self._budget = model, options, budget
        self.shelf = PlanShelf(model, options, planner, self._say)
        self.counters = Counters()
        self.checkpointing = ExistingCheckpointing(model, self._say, options.checkpointing)
        self._thread: int | None = None  # that runs the present step
        self._shapes: list[CallShape] = []  # of the calls since the last backward
        self._planned_calls = 0  # of these
        self._step: PlannedStep | None = None  # in force in the present step
        self._watch: OnlineTape | None = None
        self._expected = ExpectedBytes()
        self._seam: Seam | None = None
        self._over_bytes, self._over_reason = 0, ""  # how far steps without a plan went over the budget, as it was told
        self._spoiled = False  # the step failed, or mixes with another: no plan comes of it
        self._made_nodes: dict[int, int] = {}  # of autograd, by each call of the present step
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._sampled = parameters[:: max(1, len(parameters) // _SAMPLED_PARAMETERS)]
        self._gradients: list[Any] = []

    # -- calls of the model ---------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        observer = module_calls.thread_state.observer
        if observer is not None:
            return attach.call_in_open_region(observer, self._call, args, kwargs)
        if attach.cannot_tape():
            return self._call(*args, **kwargs)
        if not torch.is_grad_enabled():
            with self._aside():
                return self._call(*args, **kwargs)
        if self._thread not in (None, threading.get_ident()):
            self._say("the model was called on two threads at once: only one is planned")
            return self._call(*args, **kwargs)
        self._thread = threading.get_ident()
        self.counters.calls += 1
        try:
            around = self._around(shape_of_call(self._model, args, kwargs), args, kwargs)
        except Exception as error:  # nothing of ours may end the training
            self._fail(error)
            return self._call(*args, **kwargs)
        try:
            with around:
                return self._call(*args, **kwargs)
        except Exception as error:
            self._note_out_of_memory(error)
            raise

    def _around(self, shape: CallShape, args: tuple, kwargs: dict) -> Any:
        """What surrounds this call: a planned tape, or the watch."""
        if not self._shapes:
            self._begin_step(shape)
        elif self._watch is not None and (self._spoiled or (self._step is None and self._watch.num_claims == 0)):
            # A call has failed, or nobody has run backward of the calls so far and nobody can any more: no step.
            self._shapes = []
            self._begin_step(shape)
        position = len(self._shapes)
        self._shapes.append(shape)
        if self._step is not None:
            if self._watch is not None:
                return self._watched(self._watch)
            call = self._planned_call(position, shape)
            if call is None:
                self._go_online(self._step.last_op_before(position))
                return _nothing() if self._watch is None else self._watched(self._watch)
            self._planned_calls += 1
            return self._taped(self._step, position, call)
        if self._watch is None:
            return _nothing()
        if isinstance(self._watch, WatchedStep):
            self._watch.begin_call(self._model, args, kwargs)
        return self._watched(self._watch)

    def _planned_call(self, position: int, shape: CallShape) -> TapedCall | None:
        step = self._step
        assert step is not None
        at = position % len(step.shapes)  # calls whose backward never came may be among them
        if not step.shapes[at].covers(shape):
            return None
        step.tape.sizes_vary |= step.shapes[at] != shape
        return step.calls[at] if at < len(step.calls) else TapedCall()

    @contextmanager
    def _taped(self, step: PlannedStep, position: int, call: TapedCall) -> Iterator[None]:
        before = num_nodes()
        try:
            if step.tape.program.keeps_everything and not step.tape.matches_all:
                yield
            else:
                step.tape.on_divergence = self._go_online
                with attach.taped_region(step.tape, call, whole_step=False):
                    yield
        except BaseException:
            self._spoiled = True
            raise
        self._made_nodes[position] = num_nodes() - before

    def _go_online(self, last_op: int) -> OnlineTape | None:
        """The step runs other ops than its plan after ``last_op``: the rest of it is online."""
        planned = self._step
        assert planned is not None
        try:
            self._open_watch(OnlineTape, unseen_bytes=planned.made_bytes_after(last_op))
        except Exception as error:  # the step goes on without us
            self._fail(error)
        return self._watch

    @contextmanager
    def _watched(self, watch: OnlineTape) -> Iterator[None]:
        state, before, position = module_calls.thread_state, num_nodes(), len(self._shapes) - 1
        state.observer = watch
        watch.enter("")
        try:
            yield
        except BaseException:
            self._spoiled = True
            raise
        finally:
            watch.leave()
            state.observer = None
        self._made_nodes[position] = num_nodes() - before

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A pass without gradients is no part of the step: nothing is watched, what it leaves is counted."""
        if self._seam is None or not self._seam.is_here:
            yield
            return
        with self._seam.aside():
            yield

    # -- steps ----------------------------------------------------------------------------------------------

    def _begin_step(self, shape: CallShape) -> None:
        if self._watch is not None:  # its backward never came, or somebody still holds its graph
            self._close_watch(())
        self._step = self.shelf.plan_for(shape)
        self._spoiled, self._made_nodes = False, {}
        if self._step is not None:
            self._step.tape.sizes_vary = False
            return
        self.checkpointing.switch_off()
        self._open_watch(WatchedStep if self.shelf.wants_graph(shape) else OnlineTape)

    def _open_watch(self, kind: type[OnlineTape], unseen_bytes: int = 0) -> None:
        self._watch = kind(self._model, self._budget.for_step(self._model), self._expected)
        self._watch.begin_step(unseen_bytes)
        self._seam = Seam(self._watch, (self._watch.pack, self._watch.unpack))
        self._seam.open()

    def before_backward(self) -> None:
        self._gradients = [(id(p.grad), _version(p.grad)) for p in self._sampled]

    def after_backward(self, error: BaseException | None) -> None:
        try:
            if self._shapes and self._thread == threading.get_ident():
                self._spoiled |= error is not None
                self._note_out_of_memory(error)
                if self._watch is None or self._watch.num_claims == 0:
                    self._end_step()
            elif not self._shapes and [(id(p.grad), _version(p.grad)) for p in self._sampled] != self._gradients:
                self._note_unseen_step()
        except Exception as own:
            self._fail(own)
        self._gradients = []

    def _end_step(self) -> None:
        counters = self.counters
        counters.steps += 1
        step, diverged = self._step, self._watch is not None
        if step is not None:
            if not diverged and step.makes_other_nodes(self._made_nodes):
                diverged = True
                self._say(
                    "a step ran other ops than its plan where that keeps everything, which shows only at the end: it "
                    "may have taken more than the budget. Ops of such plans are followed one by one from now on"
                )
            counters.diverged_steps += diverged
            self.shelf.note_step(step, diverged=diverged)
        counters.last_step_planned = step is not None and not diverged
        counters.planned_steps += counters.last_step_planned
        counters.planned_calls += self._planned_calls
        shapes, self._shapes, self._planned_calls, self._thread = tuple(self._shapes), [], 0, None
        self._step = None
        if self._watch is not None:
            self._close_watch(() if self._spoiled else shapes)

    def _close_watch(self, shapes: tuple[CallShape, ...]) -> None:
        """The watched step is over; ``shapes`` are those of the calls of a whole step that a plan is wanted for."""
        watch, self._watch = self._watch, None
        seam, self._seam = self._seam, None
        assert watch is not None and seam is not None
        seam.close()
        self._note_peak(watch)
        if watch.checkpointed:
            self._say(
                f"{watch.checkpointed} is checkpointed (torch.utils.checkpoint): backward runs its Python again, and "
                "nothing inside it is planned. Leave that out, and a plan can recompute less"
            )
        for op in watch.releaser.differed:
            self._say(f"{op} gives other bits when it runs again: saved")
        if watch.problem:
            self._say(f"a step was saved whole: {watch.problem}")
        if not shapes or not isinstance(watch, WatchedStep) or watch.problem:
            return
        if watch.problem_of_recording:
            self.shelf.refuse(shapes[0], watch.problem_of_recording)
            return
        graph, costs = watch.graph_and_costs(self._model, self._options.optimizer)
        self.shelf.request(shapes, graph, costs, self._budget.fixed_for(graph, costs), self._made_nodes)

    def _note_peak(self, watch: OnlineTape) -> None:
        peak = self._budget.resident_bytes + watch.live.peak
        self.counters.observed_peak_bytes = max(self.counters.observed_peak_bytes or 0, peak)
        # A proof of the last resort takes more for a moment: what lived tells of it, what room was asked for does not.
        over = int(max(watch.releaser.over_bytes, watch.live.peak - watch.releaser.budget_bytes))
        if over <= self._over_bytes:
            return
        reason = (
            f"a step that ran online took up to {format_bytes(over)} more than the budget: it is the least "
            "that letting go and making again could reach"
        )
        if self._over_bytes:  # one reason, whatever the number: every step may have another
            reasons = self.counters.reasons
            reasons[:] = [reason if r == self._over_reason else r for r in reasons]
        else:
            self._say(reason)
        self._over_bytes, self._over_reason = over, reason

    def _note_out_of_memory(self, error: BaseException | None) -> None:
        """A step for which there was not enough memory: from the next one on the budget is lower, and plans with it."""
        if error is not None and is_out_of_memory(error):
            self._budget.lower()
            budget_bytes = self._budget.absolute_bytes
            if budget_bytes is not None:
                self.shelf.keep_within(budget_bytes)
                self._say(f"out of memory: the budget is {format_bytes(budget_bytes)} from the next step on")

    # -- what went wrong ------------------------------------------------------------------------------------

    def _say(self, reason: str) -> None:
        if reason not in self.counters.reasons:
            self.counters.reasons.append(reason)
            logger.warning("lowtide: %s", reason)

    def _fail(self, error: Exception) -> None:
        """An error of our own: the step goes on without us."""
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        self._say(f"an error of lowtide's own, the step is saved whole: {what}")
        self._shapes, self._thread, self._step, self._planned_calls = [], None, None, 0
        if self._seam is not None:
            self._seam.close()
        self._watch = self._seam = None

    def _note_unseen_step(self) -> None:
        self.counters.steps += 1
        self.counters.last_step_planned = False
        why = "its forward() was called directly, or a copy or a wrapper of it was"
        if module_calls.is_compiled(self._model):
            why = "it was compiled after fit"
        elif self._model._compiled_call_impl is not self:
            why = "something has replaced the model's call since fit"
        self._say(
            f"a step went by that lowtide did not see, so nothing of it was planned: {why}. Call the fitted model "
            "itself, and fit it last"
        )

    def close(self) -> None:
        """Nothing is watched any more; a graph that is still there keeps its handles."""
        if self._watch is not None:
            self._close_watch(())
        self.checkpointing.restore()
        self._shapes, self._thread = [], None


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _version(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None else gradient._version
