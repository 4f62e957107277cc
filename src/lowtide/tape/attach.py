"""How a tape is attached to a model: one guarded call on the instance, which can be taken away again."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lowtide.device import planned_ops
from lowtide.errors import PlanMismatchError
from lowtide.options import Offload, names_checked, offload_policy
from lowtide.plan import COMPILED, Plan
from lowtide.recording import sharding as sharding_recording
from lowtide.step import backward_entry, module_calls
from lowtide.step.data_parallel import unwrapped
from lowtide.step.restore import check_can_be_rehearsed
from lowtide.step.seam import is_on
from lowtide.step.whole_modules import called_whole
from lowtide.tape.offload.open_tiers import open_tiers
from lowtide.tape.offload.tiers import Tiers
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.plain_derivatives import is_in_forward_mode, is_inside_transform
from lowtide.tape.program import TapedCall, program_of
from lowtide.tape.tape import Counts, Tape
from lowtide.tracing.model_facts import ModelFacts


class TapedRegion:
    """Tape what runs inside as ``call``; with ``whole_step`` that may be several steps, backward included.

    Leaving takes mode, hooks and observer away, whatever happened inside. While a backward runs inside, the mode is
    away too: under one the engine adds partial gradients out of place, which takes more than the plain step.
    """

    def __init__(self, tape: Tape, call: TapedCall, *, whole_step: bool) -> None:
        self._tape, self._call, self._whole_step = tape, call, whole_step
        self._thread: threading.Thread | None = None  # on which it is open, as a whole step
        self._watched = False  # before the backward that runs

    def __enter__(self) -> None:
        state = module_calls.thread_state
        self._outer_observer, state.observer = state.observer, self._tape
        self._tape.enter_region(self._call, whole_step=self._whole_step)
        if self._whole_step:
            self._thread, self._forget = threading.current_thread(), backward_entry.observe(self)

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if self._thread is not None:
            self._thread = None
            self._forget()
        module_calls.thread_state.observer = self._outer_observer
        self._tape.leave_region(failed=failure is not None)

    def before_backward(self, roots: Iterable[Any], *, creates: bool) -> None:
        """See ``backward_entry``. One that creates a graph is part of the forward pass."""
        if self._thread is threading.current_thread():
            self._watched = self._tape.watches and not creates
            self._tape.switch(watches=self._tape.watches and creates, hooks=self._tape.hooks)

    def after_backward(
        self, roots: Iterable[Any], error: BaseException | None, *, retains: bool, creates: bool
    ) -> None:
        if self._thread is threading.current_thread() and self._watched:
            self._tape.watches = is_on(self._tape)  # a module that ran again in backward has switched, which is undone
            self._tape.switch(watches=True, hooks=self._tape.hooks)


class _CallInRegion:
    """The model's own call under ``apply``: part of the region that is open."""

    lowtide = True  # how ``check_supported`` knows a model under a plan

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._compiled = module_calls.compiled_call_of(model)
        self.before = None if self._compiled is None else self._compiled.before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None
        call = self._compiled or model._call_impl
        observer = module_calls.thread_state.observer
        return call(*args, **kwargs) if observer is None else call_in_open_region(observer, call, args, kwargs)


def call_in_open_region(
    observer: module_calls.CallObserver, call: Callable[..., Any], args: tuple, kwargs: dict
) -> Any:
    """Call the model where a region is open already."""
    leave = observer.leave
    if not torch.is_grad_enabled() and isinstance(observer, (Tape, OnlineTape)):
        observer.pause()
        leave = observer.resume
    else:
        observer.enter("")
    try:
        return call(*args, **kwargs)
    finally:
        leave()


def cannot_tape() -> bool:
    """Whether nothing can be taped here: in ``torch.func``, in forward-mode AD, without hooks or under a compiler."""
    return (
        is_inside_transform()
        or is_in_forward_mode()
        or not torch._C._autograd._saved_tensors_hooks_is_enabled()
        or torch.compiler.is_compiling()
    )


def check_plan_fits(model: nn.Module, plan: Plan) -> None:
    """Check that ``plan`` can be carried out on ``model``.

    Raises:
        PlanMismatchError: it names modules that ``model`` does not have, or is for another device.
        UnsupportedModelError: see ``trace``.
    """
    ModelFacts(model).check_supported()
    check_can_be_rehearsed(model)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is a {type(plan).__name__}. Pass what lowtide.solve or Plan.load returns.")
    if plan.method == COMPILED:
        raise PlanMismatchError(
            "the plan is one of lowtide.compile, for code that it has compiled. Pass it to use() of the compiled model."
        )
    have = {path for path, _ in model.named_modules()}
    missing = sorted({f.path for f in plan.frames} - have - {module_calls.NO_GRAD, sharding_recording.FRAME})
    if missing:
        raise PlanMismatchError(
            f"the plan is for another model: {len(missing)} of its modules are not in this {type(model).__name__}, "
            f"{missing[0]} first.\n  plan made for  {plan.provenance.get('model', '?')}\n"
            "Trace this model and solve again."
        )
    device = next(model.parameters()).device.type
    if device != plan.device:
        raise PlanMismatchError(
            f"the plan is for {plan.device}, the model is on {device}.\nMove the model, or trace and solve there."
        )


class Applied:
    """A plan in force on a model; ``counts`` says what the tape did."""

    def __init__(self, plan: Plan, tape: Tape) -> None:
        self.plan, self._tape = plan, tape

    @property
    def counts(self) -> Counts:
        return self._tape.counts


@names_checked
@contextmanager
def apply(model: nn.Module, plan: Plan, *, offload: Offload | None = None) -> Iterator[Applied]:
    """Carry out ``plan`` for everything that runs forward inside, the loss too; backward may run inside or after.

    Args:
        offload: Where a plan that moves storages to disk or host memory keeps them, and how many bytes at most;
            by default as many as the plan needs, on disk in the system's directory for temporary files.

    Yields:
        An ``Applied``; its ``counts`` say what was dropped, moved and saved.

    Raises:
        PlanMismatchError: the plan is for another model or device.
        UnsupportedModelError: see ``trace``.
        TierError: the plan moves storages to a tier that this machine does not have, or that has no room.
    """
    policy = offload_policy(offload)
    model = unwrapped(model)
    check_plan_fits(model, plan)
    planned_ops.prepare()
    with applied(model, plan, open_tiers(plan, policy)) as found:
        yield found


@contextmanager
def applied(model: nn.Module, plan: Plan, tiers: Tiers) -> Iterator[Applied]:
    """``apply`` with a plan that has been checked, and tiers that are open."""
    tape = Tape(program_of(plan), model, tiers)
    with taped_step(model, tape):
        yield Applied(plan, tape)


@contextmanager
def taped_step(model: nn.Module, tape: Tape) -> Iterator[None]:
    """Tape everything that runs forward inside."""
    program = tape.program
    with called_whole(model, program.called_whole):
        undo = module_calls.install(model, _CallInRegion(model))
    try:
        with nullcontext() if program.keeps_everything else TapedRegion(tape, program.root, whole_step=True):
            yield
    finally:
        undo()
