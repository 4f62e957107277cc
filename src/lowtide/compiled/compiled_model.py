"""``lowtide.compile``: a model whose repeated layers are compiled, each so that the step fits a budget."""

from __future__ import annotations

import gc
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.compiled import op_rates
from lowtide.compiled.captured_layer import device_of
from lowtide.compiled.choice import called
from lowtide.compiled.compiled_plan import CompiledPlan
from lowtide.compiled.counted_steps import CountedSteps
from lowtide.compiled.evaluation import compiled_without_gradients
from lowtide.compiled.input_shapes import InputShapes, shapes_of
from lowtide.compiled.layer_calls import SEEN_BY_A_MODE, LayerCall, LayerKind, Session
from lowtide.compiled.memory_between_layers import MemoryBetweenLayers, is_of
from lowtide.compiled.softmax_gradients import SoftmaxGradients
from lowtide.compiled.step_plan import StepPlanner
from lowtide.device import allocation_counter, values_off
from lowtide.device.names import is_accelerator
from lowtide.device.streams import is_captured
from lowtide.errors import BudgetInfeasibleError, PlanMismatchError, UnsupportedModelError
from lowtide.pytorch_internals import COMPILED, is_unchecked, why_unchecked
from lowtide.recording.finished_graph import resident_bytes
from lowtide.reports.terminal import fit_report
from lowtide.step import backward_entry
from lowtide.step.batches import Call, batch_tensors
from lowtide.step.module_calls import is_compiled, is_lowtide_call, never_compiled
from lowtide.step.operators import gradient_of
from lowtide.step.optimizer_state import UnknownStateError, optimizer_bytes
from lowtide.training.budget import StepBudget
from lowtide.training.existing_checkpointing import ExistingCheckpointing
from lowtide.training.notices import Notices
from lowtide.training.status import WATCHED, Counters, Status
from lowtide.units import format_bytes, parse_budget

_MOST_CORRECTIONS = 3
_EXACT = 1e-3  # of what a step takes: so far apart may prediction and count be
_RECOMPILE_LIMIT = 256  # of Dynamo, for one code object: layers of all kinds and shapes share one


def compile(  # torch's word for it
    model: nn.Module,
    *,
    budget: int | str | None = None,
    layers: Sequence[str] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    dynamic: bool = False,
    round_as_eager: bool = False,
) -> CompiledModel:
    """Compile each repeated layer of ``model`` so that a training step stays within ``budget`` and is fastest.

    Nothing of the model runs now. The first step of each set of input shapes compiles the layers so that they store as
    little as they can, and is watched; then there is a plan. A model as one graph stores what its budget allows, as far
    as the graph alone says. Gradients are bitwise those of the layers compiled without lowtide.

    Args:
        model: On one device, a CPU or an accelerator. It is changed in place until ``remove()``.
        budget: Peak of allocated bytes (an int, or ``"6GiB"``), or ``"40%"`` of what the plain compiled step needs
            beyond what lives throughout; None: compile as PyTorch does.
        layers: Patterns of module paths (``"model.layers.*"``) instead of the repeated modules that are found;
            ``["*"]`` is the model as one graph.
        optimizer: Its state counts as resident from the first step on. One that nobody passes is found when it steps.
        dynamic: Compile once for all sizes, as ``torch.compile(dynamic=True)`` does. A plan is made for the largest
            inputs that came and serves the smaller ones. Without, each set of input shapes is compiled and planned.
        round_as_eager: Compile with Inductor's ``emulate_precision_casts``. In bfloat16 and float16 a fused kernel
            keeps more digits than the memory between two kernels, so variants seldom have the bits of the plain layer,
            and are left out. With this all round alike; gradients are those of layers compiled with that setting.

    Raises:
        UnsupportedModelError: there are no such layers, or one is compiled already, or checkpoints. Or the model lies
            on several devices, or on one that Inductor has no code for. A layer that cannot be compiled as one graph is
            refused by its first call.
        ValueError, TypeError: ``budget`` makes no sense.
    """
    return CompiledModel(
        model, budget=budget, layers=layers, optimizer=optimizer, dynamic=dynamic, round_as_eager=round_as_eager
    )


class _PlannedCall:
    """Takes the place of the model's own call: a trainer that calls the model runs the plan, too.

    Attributes:
        before: What it took the place of; None: nothing.
    """

    lowtide = True  # how others know a model that has a plan

    def __init__(self, compiled: CompiledModel, before: Callable[..., Any] | None) -> None:
        self._compiled, self.before = compiled, before

    @property
    def counters(self) -> Counters:
        return self._compiled._counted.counters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)


class CompiledModel(nn.Module):
    """A model whose layers run compiled; attributes, parameters and state dict are those of the model.

    Calls of the model itself are calls of this.

    Attributes:
        plan: Of the last step that ran under one, or what was planned since; None before the first step has ended.
        reason: Why the last step without a plan has led to none, or no step gets one; "" where it has.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        budget: int | str | None,
        layers: Sequence[str] | None,
        optimizer: torch.optim.Optimizer | None,
        dynamic: bool = False,
        round_as_eager: bool = False,
    ) -> None:
        super().__init__()
        self._budget = _parsed(budget)
        names = _layers_of(model, layers)
        self.__dict__["_model"] = self.__dict__["lowtide_inside"] = model  # no submodule: names of parameters stay
        self.__dict__["_session"] = session = Session()
        self._optimizer, self._patterns = optimizer, layers
        self._dynamic, self._round_as_eager = dynamic, round_as_eager
        self.training = model.training
        self._planners: dict[InputShapes, StepPlanner] = {}
        self._plans: dict[InputShapes, CompiledPlan] = {}
        self._pending: tuple[InputShapes, MemoryBetweenLayers, int, int] | None = None
        self._last_plan: CompiledPlan | None = None
        self._unplanned: set[InputShapes] = set()  # input shapes that no plan holds for: each layer runs its leanest
        self._alone: set[InputShapes] = set()  # which no plan for larger inputs serves
        self._num_calls = 0
        self._last_calls: dict[InputShapes, int] = {}  # number of the last call, by input shapes
        self._softmaxes = SoftmaxGradients(partial(is_of, session))
        self._held_bytes: dict[
            InputShapes, int
        ] = {}  # by input shapes: gradients not written over when the step was watched
        self._is_unchecked, self.reason = is_unchecked(COMPILED), why_unchecked(COMPILED)
        self._notices = Notices()
        # What is there beside the layers' own: of the budget it is asked nothing.
        self._memory = StepBudget(model, "100%", optimizer)
        self._counted, self._num_corrections, self._planning_s = CountedSteps(self._memory, self._notices), 0, 0.0
        self._num_states = -1  # of parameters, when the optimizer's state was looked at last
        forget = [self._memory.optimizers.observe(), backward_entry.observe(self._counted)]
        if values_off.are_off:
            self._notices.note(values_off.REASON)
        if self._is_unchecked:
            self._notices.note(self.reason)
        else:
            forget.append(backward_entry.observe(self._softmaxes))
            allocation_counter.prepare()
            op_rates.measure_copies(self._device)
        self._forget: Callable[[], Any] = lambda: [one() for one in forget]
        kinds: dict[type, tuple[LayerKind, Callable[..., Any]]] = {}
        self._calls: dict[str, LayerCall] = {}
        modules = dict(model.named_modules())
        how = {"round_as_eager": round_as_eager, "dynamic": dynamic}
        for name in names:
            module, kind = modules[name], type(modules[name])
            if kind not in kinds:
                kinds[kind] = LayerKind(session, whole=name == "", **how), compiled_without_gradients(kind, **how)
            planned, evaluate = kinds[kind]
            backend = "inductor" if self._is_unchecked else planned
            self._calls[name] = LayerCall(name, module, backend, session, evaluate)
        self._own_call = _PlannedCall(self, model._compiled_call_impl)
        model._compiled_call_impl = self._own_call

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_model"], name)

    @property
    def plan(self) -> CompiledPlan | None:
        """The plan for the last input shapes that were seen in a whole step; None before.

        Raises:
            BudgetInfeasibleError: no choice fits the budget.
        """
        self._plan_watched()
        return self._last_plan

    @property
    def plans(self) -> tuple[CompiledPlan, ...]:
        """Those at hand, by set of input shapes."""
        return tuple(self._plans.values())

    def set_budget(self, budget: int | str | None) -> None:
        """Plan for another budget from now on; what is compiled stays, and only what is missing is compiled.

        Raises:
            BudgetInfeasibleError: no choice fits it. The plans that there are stay in force.
        """
        parsed = _parsed(budget)
        self._end_watch()
        plans = {shapes: self._plan_for(shapes, parsed) for shapes in self._planners}
        self._budget, self._plans = parsed, plans  # not before all fit
        self._unplanned -= plans.keys()
        self._last_plan = next(reversed(plans.values()), None)

    def use(self, plan: CompiledPlan) -> None:
        """Run the steps that ``plan`` was made for by it again; plans for other shapes stay.

        Raises:
            PlanMismatchError: this model did not make it, or what it was made for is no more.
        """
        made_for = [shapes for shapes, planner in self._planners.items() if planner.has_made(plan)]
        if not made_for:
            raise PlanMismatchError(
                "the plan is of another model, or was lost, as compiled.reason tells. Use one that this compiled model "
                "has made since."
            )
        self._unplanned.discard(made_for[0])
        self._last_plan = self._plans[made_for[0]] = plan

    def wait(self, timeout_s: float | None = None) -> CompiledModel:
        """Plan now for what was watched, which the next call of the model does otherwise. It takes what it takes.

        Raises:
            BudgetInfeasibleError: as ``plan``.
        """
        self._plan_watched()
        return self

    def status(self) -> Status:
        """What really ran so far, as ``Fit.status``; peaks are the allocator's. Nobody waits for a device."""
        counters = self._counted.counters
        return Status.of(
            counters,
            why_not=counters.why_not_planned if self._calls else "the model was taken apart by remove()",
            budget_bytes=self._budget_bytes,
            shapes=len(self._last_calls),
            plans=len(self._plans),
            planning_s=self._planning_s,
            reasons=self._notices.lines,
        )

    def report(self) -> str:
        """What really ran, and what the plan used last decided and predicts; at most 100 columns.

        Raises:
            BudgetInfeasibleError: as ``plan``.
        """
        plan, headline = self.plan, self.status().headline
        if plan is None:
            return str(self.status())
        left_out = [f"left out: {reason}" for reason in plan.refused]
        return f"{headline}\n\n{fit_report(plan, warnings=[*left_out, *self._notices.lines])}"

    def remove(self) -> None:
        """Have the model as it was before ``compile``."""
        model = self._model
        if model._compiled_call_impl is self._own_call:
            model._compiled_call_impl = self._own_call.before
        for call in self._calls.values():
            call.remove()
        self._calls.clear()
        self._forget()

    def __reduce__(self) -> tuple:
        """Copies and pickles hold the model and the settings. What is compiled is made anew by their first step."""
        self._check_in_force()
        options = {"layers": self._patterns, "optimizer": self._optimizer}
        options |= {"dynamic": self._dynamic, "round_as_eager": self._round_as_eager}
        return _compiled_anew, (self._model, self._budget, options)

    def _check_in_force(self) -> None:
        if not self._calls:
            raise PlanMismatchError("the model was taken apart by remove(). Take the model itself, or compile it anew.")

    def _call_model(self, *args: Any, **kwargs: Any) -> Any:
        return (self._own_call.before or self._model._call_impl)(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._check_in_force()
        session: Session = self._session
        if not torch.is_grad_enabled():
            return self._call_model(*args, **kwargs)
        if is_captured(self._device):
            return self._captured(shapes_of(args, kwargs, self._model), args, kwargs)
        self._plan_watched()
        self._keep_budget()
        self._find_held_gradients()
        shapes = shapes_of(args, kwargs, self._model)
        self._num_calls += 1
        self._last_calls[shapes] = self._num_calls
        planned_as = self._planned_as(shapes)
        plan = self._plans.get(planned_as)
        self._last_plan = plan or self._last_plan
        session.not_as_planned, session.training = "", session.training or bool(self._plans)
        session.seen_by_a_mode = False
        if plan is None and not self._is_unchecked:
            op_rates.measure_copies(self._device)  # the model may lie elsewhere than when it was compiled
        self._count(planned_as, plan, Call(args, kwargs))
        if self._is_unchecked:
            with _many_shapes(dynamic=self._dynamic):
                outputs = self._call_model(*args, **kwargs)
            self._follow_backward(shapes, outputs)
            return outputs
        with _many_shapes(dynamic=self._dynamic):
            if plan is None and shapes not in self._unplanned:
                outputs = self._watched(shapes, args, kwargs)
            else:
                outputs = self._as_planned(planned_as, args, kwargs)
        if session.seen_by_a_mode:
            self._counted.leave_plan(SEEN_BY_A_MODE)
            self._notices.say(SEEN_BY_A_MODE)
            if self._pending is not None:
                self._pending[1].failed = SEEN_BY_A_MODE
        if session.not_as_planned:
            self._counted.leave_plan(session.not_as_planned)
            if planned_as != shapes:
                self._alone.add(shapes)
            self._lose_plan(shapes, session.not_as_planned)
        self._follow_backward(shapes, outputs)
        return outputs

    def _as_planned(self, shapes: InputShapes, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call by the plan for ``shapes``; where there is none, each layer runs its leanest."""
        session, plan = self._session, self._plans.get(shapes)
        session.variants = {} if plan is None else plan.layers
        session.shapes = {} if plan is None else self._planners[shapes].shapes
        return self._call_model(*args, **kwargs)

    def _captured(self, shapes: InputShapes, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call that a CUDA graph captures, by the plan that there is: nothing can be planned or compiled in it.

        Raises:
            PlanMismatchError: there is none, or these inputs are not those that it is for.
        """
        planned_as = self._planned_as(shapes)
        if not (self._is_unchecked or planned_as in self._plans or shapes in self._unplanned):
            raise PlanMismatchError(
                "the model is called while a CUDA graph is captured, and there is no plan for these inputs: the first "
                "step is watched, the second compiles what was planned, and neither can be captured.\n"
                "Run two whole steps with the same inputs before the capture."
            )
        session: Session = self._session
        session.not_as_planned = ""
        with _many_shapes(dynamic=self._dynamic):
            outputs = self._as_planned(planned_as, args, kwargs)
        if session.not_as_planned:
            raise PlanMismatchError(f"the step that a CUDA graph captures is not as planned: {session.not_as_planned}.")
        return outputs

    def _planned_as(self, shapes: InputShapes) -> InputShapes:
        """Whose plan these inputs run by: their own, or that of the least larger ones."""
        if not self._dynamic or shapes in self._plans or shapes in self._alone:
            return shapes
        larger = [other for other in self._plans if other.covers(shapes)]
        return min(larger, key=lambda other: math.prod(other.sizes), default=shapes)

    def _count(self, shapes: InputShapes, plan: CompiledPlan | None, call: Call) -> None:
        """A step begins."""
        is_watched = plan is None and shapes not in self._unplanned and not self._is_unchecked
        why_not = "" if plan is not None else WATCHED if is_watched else self.reason
        self._counted.begin(self._model, call, shapes, plan, budget_bytes=self._budget_bytes, why_not=why_not)

    @property
    def _budget_bytes(self) -> int | None:
        """None as long as a percentage waits for the first plan, and where there is no budget."""
        known = self._last_plan.budget_bytes if self._last_plan is not None else self._budget
        return known if isinstance(known, int) else None

    def _plan_for(self, shapes: InputShapes, budget: int | float | None) -> CompiledPlan:
        """Raises: BudgetInfeasibleError."""
        began_s = time.perf_counter()
        try:
            return self._planners[shapes].plan(budget)
        finally:
            self._planning_s += time.perf_counter() - began_s

    def _keep_budget(self) -> None:
        """Plan again where steps under a plan take more than the budget, by the allocator's own count."""
        step = self._counted.take()
        if step is None or step.plan.budget_bytes is None or self._plans.get(step.shapes) is not step.plan:
            return
        over = step.peak_bytes - step.plan.budget_bytes
        more = step.peak_bytes - step.plan.predicted_peak_bytes
        exact = more <= _EXACT * (step.plan.predicted_peak_bytes - step.plan.resident_bytes)
        if over <= 0 or exact or self._num_corrections >= _MOST_CORRECTIONS:
            return
        self._num_corrections += 1
        self._tell(
            f"steps took {format_bytes(more)} more than their plan predicts and {format_bytes(over)} more than the "
            "budget, by the allocator's count; it is planned again with that margin. Segments that do not grow take "
            "more (PYTORCH_ALLOC_CONF=expandable_segments:True)"
        )
        self._planners[step.shapes].add_margin(more)
        self._plan_again(step.shapes, step.plan.budget_bytes)

    def _follow_state(self) -> None:
        """Plan again where an optimizer has more state than a plan knows."""
        num_states = len(getattr(self._memory.optimizers.all(), "state", None) or ())
        if num_states == self._num_states:
            return
        self._num_states, state_bytes = num_states, self._memory.state_bytes()
        for shapes, planner in self._planners.items():
            if planner.add_state(state_bytes) and shapes in self._plans:
                self._plan_again(shapes, self._budget)

    def _plan_again(self, shapes: InputShapes, budget: int | float | None) -> None:
        try:
            self._last_plan = self._plans[shapes] = self._plan_for(shapes, budget)
        except BudgetInfeasibleError as error:
            first = str(error).splitlines()[0].rstrip(".")
            self._tell(f"{first}, by what is counted now. The plan that there is stays in force")

    def _find_held_gradients(self) -> None:
        """Warn of a gradient that was written over in the watched step and was held elsewhere in the last backward."""
        last = max(self._last_calls, key=self._last_calls.__getitem__, default=None)
        watched = None if last is None else self._held_bytes.get(self._planned_as(last))
        more = 0 if watched is None else self._softmaxes.held_bytes - watched
        if more > 0:
            self._tell(
                f"something holds a softmax's gradient of {format_bytes(more)}, a hook or a mode perhaps, which "
                "nothing held when the step was watched. It is not written over: a step may take that more than planned"
            )

    def _follow_backward(self, shapes: InputShapes, outputs: Any) -> None:
        """Note the backward of this call. One that comes after the next call has begun is told: no plan counts both."""
        number, model = self._num_calls, weakref.ref(self)

        @never_compiled
        def begun(gradient: Any) -> None:
            compiled = model()
            if compiled is None:
                return
            compiled._counted.reach()
            if compiled._num_calls == number or compiled._is_unchecked:
                return
            alive = {shapes, *(other for other, last in compiled._last_calls.items() if last > number)}
            for one in alive - (compiled._unplanned - compiled._planners.keys()):
                compiled._unplanned.add(one)
                compiled._lose_plan(
                    one,
                    "several calls of the model ran before one backward. Plans are for one call at a time, so this "
                    "step took more than its budget; from now on each layer stores as little as it can",
                )

        for tensor in batch_tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(begun)

    def _lose_plan(self, shapes: InputShapes, why: str) -> None:
        """No later budget brings it back: what it was made from is no longer what runs."""
        plan = self._plans.pop(shapes, None)
        self._planners.pop(shapes, None)
        if self._last_plan is plan:
            self._last_plan = None
        if self._pending is not None:
            self._pending[1].failed = why
        self._tell(why)

    def _tell(self, why: str) -> None:
        if self.reason != why:
            warnings.warn(f"lowtide.compile: {why.rstrip('.')}.", stacklevel=4)
            self._notices.note(why.rstrip("."))
        self.reason = why

    def _watched(self, shapes: InputShapes, args: tuple, kwargs: dict[str, Any]) -> Any:
        session: Session = self._session
        resident, state = self._resident_bytes(Call(args, kwargs))
        watch = MemoryBetweenLayers(self._device)
        self._pending = shapes, watch, resident, state
        session.variants, session.shapes, session.watch = {}, {}, watch
        session.limit = self._budget - resident if isinstance(self._budget, int) else self._budget
        try:
            return self._call_model(*args, **kwargs)
        except BaseException:
            watch.stop()
            self._pending = None
            raise
        finally:
            session.watch = session.limit = None

    def _plan_watched(self) -> None:
        """Plan what was watched and has no plan yet.

        Raises:
            BudgetInfeasibleError: no choice fits, and there is no plan at all. Later ones end no run.
        """
        self._end_watch()
        self._follow_state()
        for shapes in [s for s in self._planners if s not in self._plans and s not in self._unplanned]:
            try:
                self._last_plan = self._plans[shapes] = self._plan_for(shapes, self._budget)
            except BudgetInfeasibleError as error:
                if not self._plans:
                    raise
                self._unplanned.add(shapes)
                first = str(error).splitlines()[0].rstrip(".")
                self._tell(f"{first}. Steps of these input shapes take more; each layer stores as little as it can")

    def _end_watch(self) -> None:
        """Make a planner of the step that was watched, if it has ended."""
        if self._pending is None:
            return
        shapes, watch, resident, state = self._pending
        watch.stop()
        self._pending = None
        if watch.failed or not watch.complete or not watch.shapes:
            if shapes not in self._unplanned:
                self.reason = watch.failed or "the last call without a plan had no backward"
            return  # the next call is watched
        self.reason = ""
        self._held_bytes[shapes] = self._softmaxes.held_bytes
        self._num_states = -1
        self._planners[shapes] = StepPlanner(
            watch.moments, watch.shapes, resident, state_bytes=state, margin_bytes=watch.off_bytes,
            handed_on=watch.handed_on,
        )  # fmt: skip

    def _resident_bytes(self, call: Call) -> tuple[int, int]:
        """What lives through the whole step, and the optimizer's state in it."""
        there = {name for name, p in self._model.named_parameters() if gradient_of(p) is not None}
        optimizer, existing = self._memory.optimizers.all(), self._memory.state_bytes()
        try:
            state, _ = optimizer_bytes(optimizer, [p for p in self._model.parameters() if p.requires_grad])
        except UnknownStateError as error:  # what it keeps counts once it is there
            state = existing
            self._notices.note(str(error).splitlines()[0].rstrip("."))
        gc.collect()  # what is garbage would count
        return state + sum(resident_bytes(self._model, call, self._device, there, existing).values()), state

    @property
    def _device(self) -> torch.device:
        return device_of([*self._model.parameters(), *self._model.buffers()])

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self._model.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return self._model.named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> CompiledModel:
        self.training = mode
        self._model.train(mode)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> CompiledModel:
        self._model._apply(*args, **kwargs)
        return self


@contextmanager
def _many_shapes(*, dynamic: bool) -> Iterator[None]:
    """Inside, Dynamo compiles one code object for many layers and shapes.

    Where sizes are symbols, numbers in a layer's code stay numbers, and equal sizes are not taken for one.
    """
    limits: dict[str, Any] = {
        "recompile_limit": _RECOMPILE_LIMIT,
        "accumulated_recompile_limit": 4 * _RECOMPILE_LIMIT,
    }
    with ExitStack() as patched:
        if dynamic:
            patched.enter_context(torch.fx.experimental._config.patch(use_duck_shape=False))
            limits["specialize_float"] = True
        patched.enter_context(torch._dynamo.config.patch(limits))
        yield


def _compiled_anew(model: nn.Module, budget: int | float | None, options: dict[str, Any]) -> CompiledModel:
    made = CompiledModel(model, budget=None, **options)
    made._budget = budget
    return made


def _parsed(budget: int | str | None) -> int | float | None:
    if budget is None:
        return None
    parsed = parse_budget(budget)
    if isinstance(parsed, str):
        raise ValueError('budget="auto" is not offered for compiled models. Pass bytes, "6GiB" or "40%".')
    return parsed


def _layers_of(model: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Paths of the modules to compile, none inside another."""
    modules = dict(model.named_modules())
    if any(is_lowtide_call(module._compiled_call_impl) for module in modules.values()):
        raise UnsupportedModelError(
            f"the {type(model).__name__} has a plan already, from lowtide.fit or lowtide.compile: two plans cannot "
            "drive one model. Call remove() of that first."
        )
    if patterns is not None:
        found = [name for name in modules if any(fnmatchcase(name, pattern) for pattern in patterns)]
        way_out = f"layers={list(patterns)!r} matches none of its modules."
    else:
        lists = nn.ModuleList, nn.ModuleDict, nn.Sequential
        found = [name for name, module in modules.items() if isinstance(module, lists)]
        found = [f"{name}.{child}".lstrip(".") for name in found for child in _repeated(modules[name])]
        way_out = "it has no list of two or more equal modules. Name its layers with layers=."
    outer = [""] if "" in found else [n for n in found if not any(n.startswith(f"{other}.") for other in found)]
    if not outer:
        raise UnsupportedModelError(f"there is nothing to compile in the {type(model).__name__}: {way_out}")
    check_devices(t.device for t in [*model.parameters(), *model.buffers()])
    for name in outer:
        if any(is_compiled(m) for m in modules[name].modules()):
            raise UnsupportedModelError(
                f"{called(name)} is compiled already. Take that off: lowtide.compile compiles it."
            )
        if told := ExistingCheckpointing(modules[name]).told:
            raise UnsupportedModelError(
                f"{called(name)} has {told} on. Switch it off: the plan decides what backward computes again."
            )
    return outer


def check_devices(of_tensors: Iterable[torch.device]) -> None:
    """Whether a model whose tensors lie there can be planned. Raises: UnsupportedModelError."""
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration

    devices = set(of_tensors)
    if len(found := sorted(str(d) for d in devices if is_accelerator(d))) > 1:
        raise UnsupportedModelError(
            f"the model lies on {', '.join(found)}. lowtide.compile plans for the memory of one device. Compile the "
            "part on each device, or use lowtide.fit."
        )
    init_backend_registration()
    for device in devices:
        if get_scheduling_for_device(device.type) is None:
            raise UnsupportedModelError(
                f"the model lies on {device}, for which Inductor writes no code here. Use lowtide.fit there."
            )


def _repeated(parent: nn.Module) -> list[str]:
    """Children of a class that two or more of them have, if they hold parameters."""
    children = list(parent.named_children())
    classes = [type(child) for _, child in children if not isinstance(child, (nn.ModuleList, nn.ModuleDict))]
    return [
        name
        for name, child in children
        if classes.count(type(child)) >= 2
        and any(True for _ in child.children())
        and any(True for _ in child.parameters())
    ]
