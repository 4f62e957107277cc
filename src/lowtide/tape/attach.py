"""Where the tape meets a model: one guarded call on the instance, taken away without a trace."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.errors import PlanMismatchError
from lowtide.plan import Plan
from lowtide.tape.offload.tier_settings import TierSettings
from lowtide.tape.program import Node, Program
from lowtide.tape.tape import Counts, Tape
from lowtide.tracing import module_calls
from lowtide.tracing.data_parallel import unwrap_ddp
from lowtide.tracing.fsdp import recording as fsdp_recording
from lowtide.tracing.tracer import check_supported


class GuardedCall:
    """The model's own call: taped where gradients are wanted and the plan has something to do, else as it was.

    ``choose(args, kwargs)`` gives the tape and the planned call for this input, or None to run plainly.
    """

    lowtide = True  # how ``check_supported`` knows a fitted model

    def __init__(self, model: nn.Module, choose: Callable[[tuple, dict], tuple[Tape, Node] | None]) -> None:
        self._model = weakref.ref(model)
        self._compiled = module_calls.compiled_call_of(model)
        self.before = None if self._compiled is None else self._compiled.before
        self.choose = choose

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None
        call = self._compiled or model._call_impl
        watcher = module_calls.thread_state.observer
        if watcher is not None:
            return _inside(watcher, call, args, kwargs)
        if not torch.is_grad_enabled() or steps_aside():
            return call(*args, **kwargs)
        chosen = self.choose(args, kwargs)
        if chosen is None:
            opened = module_calls.thread_state.observer  # choosing may have begun a region for the whole step
            return call(*args, **kwargs) if opened is None else _inside(opened, call, args, kwargs)
        tape, node = chosen
        if not tape.free.acquire(blocking=False):  # another thread is in this very tape: here all is saved
            return call(*args, **kwargs)
        try:
            with tape.region(node, whole_step=False):
                return call(*args, **kwargs)
        finally:
            tape.free.release()


def _inside(watcher: module_calls.CallObserver, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """The model is called in a region that is taped already."""
    if not torch.is_grad_enabled() and isinstance(watcher, Tape):
        watcher.pause()
        try:
            return call(*args, **kwargs)
        finally:
            watcher.resume()
    watcher.enter("")
    try:
        return call(*args, **kwargs)
    finally:
        watcher.leave()


def steps_aside() -> bool:
    """Under ``torch.func`` transforms, forbidden hooks or a compiler nothing can be taped: all is saved."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or not torch._C._autograd._saved_tensors_hooks_is_enabled()
        or torch.compiler.is_compiling()
    )


def check_plan_fits(model: nn.Module, plan: Plan) -> None:
    """Raises: PlanMismatchError: the plan names modules that the model does not have."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is a {type(plan).__name__}. Pass what lowtide.solve or Plan.load returns.")
    have = {path for path, _ in model.named_modules()}
    missing = sorted({f.path for f in plan.frames} - have - {module_calls.NO_GRAD, fsdp_recording.FRAME})
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
    """A plan in force on a model. ``counts`` says what the tape met."""

    def __init__(self, plan: Plan, tape: Tape) -> None:
        self.plan, self._tape = plan, tape

    @property
    def counts(self) -> Counts:
        return self._tape.counts


@contextmanager
def apply(
    model: nn.Module,
    plan: Plan,
    *,
    scratch_dir: str | Path | None = None,
    checksums: bool = False,
) -> Iterator[Applied]:
    """Everything that runs forward inside is taped by ``plan``, the loss too; backward may run inside or after.

    Args:
        scratch_dir: Where a plan that moves storages to disk keeps them; by default the system's directory for
            temporary files.
        checksums: Compare what comes back from there with what was written.

    Raises:
        PlanMismatchError: the plan is for another model or device. UnsupportedModelError: see ``trace``.
        TierError: the plan moves storages to a tier that is not here, or that has no room.
    """
    with applied(model, plan, TierSettings(scratch_dir, checksums=checksums)) as found:
        yield found


@contextmanager
def applied(model: nn.Module, plan: Plan, places: TierSettings) -> Iterator[Applied]:
    """``apply``, with all that may be said of tiers."""
    model = unwrap_ddp(model)
    check_supported(model)
    check_plan_fits(model, plan)
    program = program_of(plan)
    tape = Tape(program, model, places.open(plan))
    undo = module_calls.install(model, GuardedCall(model, lambda args, kwargs: None))
    try:
        if program.keeps_everything:
            yield Applied(plan, tape)
        else:
            with tape.region(program.root, whole_step=True):
                yield Applied(plan, tape)
    finally:
        undo()


def program_of(plan: Plan) -> Program:
    """The plan's program, made once: what audits found belongs to the plan and outlives one ``apply``."""
    program = plan.__dict__.get("_program")
    if program is None:
        program = Program(plan)
        object.__setattr__(plan, "_program", program)  # a cache beside the frozen fields, as cached_property does
    return program
