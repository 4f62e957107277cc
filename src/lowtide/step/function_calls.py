"""Calls of custom ``torch.autograd.Function``s: seen while a step is recorded or taped, and run again.

What kernels such a Function launches (Triton, C, NumPy) no dispatcher sees. The call itself passes one place. Up to
PyTorch 2.13 that is ``_SingleLevelFunction.apply``: ``Function.apply`` looks it up when it is called, so a bound
``F.apply`` that a library keeps passes it as well. From 2.14 on it is ``Function.apply`` itself, a function of C; what
was bound before is not seen, and what it makes is saved. An observer runs the call through a subclass whose ``forward``
reports what was returned and what is to be stored, before autograd stores it. Context, backward and the names of nodes
stay those of the Function.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch._C import _AutoDispatchBelowADInplaceOrView as below_autograd
from torch._C import _current_graph_task_id as graph_task
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd.function import Function, FunctionCtx, _SingleLevelFunction
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.device.generators import GeneratorStates
from lowtide.device.names import autocast_types
from lowtide.device.numeric_flags import numeric_flags
from lowtide.graph.function_ops import ELSEWHERE, PREFIX
from lowtide.pytorch_internals import STEPS, is_unchecked
from lowtide.step.bits import same_bits
from lowtide.step.kinds_of_calls import Kind, is_immutable, layout_of, values_of
from lowtide.step.operators import fingerprint, storage_of, tensors_in
from lowtide.step.other_generators import HostGenerators, OwnGenerators, draws_from

# Told of the context and of what the Function returned.
Finished = Callable[[Any, Any], None]
UNSETTLED = "has not been optimized by TorchScript yet"  # for this one call
TRANSPARENT = "its operators say all"  # in place of a reason why what a call makes is kept
TENSOR = object()  # in place of a tensor among arguments
# Theirs do no work that a plan would want, or work that must not run twice (collectives, checkpoints).
_NOT_SEEN = ("torch.", "lowtide.", "deepspeed.", "torch_remat.")
# The class whose ``apply`` every call passes.
_BY_C = not isinstance(vars(Function)["apply"], classmethod)
_PLACE: Any = Function if _BY_C else _SingleLevelFunction
_C_APPLY = vars(Function)["apply"]
_thread_state: Any = None  # whose ``observer`` gets the calls, while there is one
_installed = 0


def name_of(function: type) -> str:
    """The name of the op that a call of ``function`` is."""
    return f"{PREFIX}{function.__qualname__.replace('.<locals>', '').replace('.', '_')}.{function.__module__}"


class CallOfFunction:
    """How one call was made: all that running it again needs beside the tensors that it was given.

    Attributes:
        requires_grad: Of each argument; so the context says of each whether it needs a gradient.
        autocast: Device type and dtype where autocast was on.
        flags: The global ones that decide bits.
        stays_whole: It is one op even where its operators say all.
    """

    __slots__ = ("_arguments", "_own_generators", "autocast", "flags", "function", "requires_grad")
    stays_whole = False

    def __init__(self, function: type, args: tuple) -> None:
        self.function = function
        self._arguments = tuple(TENSOR if isinstance(a, torch.Tensor) else a for a in args)
        self.requires_grad = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        self.autocast = tuple(
            (d, torch.get_autocast_dtype(d)) for d in autocast_types() if torch.is_autocast_enabled(d)
        )
        self.flags = numeric_flags()
        self._own_generators: OwnGenerators | None = None

    @property
    def restores(self) -> Sequence[torch.Tensor]:
        """Tensors that another run writes, and puts back."""
        return ()

    @property
    def owned(self) -> Sequence[torch.Tensor]:
        """Tensors that it reads beside those that it is given, and that are no result of it."""
        return ()

    @property
    def own_generators(self) -> OwnGenerators:
        """Those in what its code refers to."""
        if self._own_generators is None:
            self._own_generators = OwnGenerators(self._roots())
        return self._own_generators

    def _roots(self) -> Iterator[tuple[str, Any]]:
        """Where code begins that runs in it."""
        yield self.function.__qualname__.rpartition(".")[2], self.function
        yield from ((getattr(a, "__name__", ""), a) for a in self._arguments if callable(a))

    def why_not_again(self) -> str:
        """What is against a second run, by what it is given and refers to; "" where nothing is."""
        for argument in self._given_beside_tensors():
            if not is_immutable(argument):
                return f"is given a {type(argument).__qualname__}, which may change before backward"
        return draws_from(self.own_generators.named)

    def _given_beside_tensors(self) -> Iterator[Any]:
        yield from (a for a in self._arguments if a is not TENSOR)

    def run_again(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See ``run_again``."""
        return _run_function_again(self, tensors)

    def kind(self, args: tuple) -> Kind:
        """What decides which kernels run: equal for calls of which one proves the other."""
        return Kind((self.function, self.requires_grad, self.autocast, self.flags, layout_of(args)), values_of(args))

    def arguments(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        """The arguments, with ``tensors`` in place of those of the call."""
        given = iter(tensors)
        return [
            (next(given).detach().requires_grad_() if required else next(given)) if a is TENSOR else a
            for a, required in zip(self._arguments, self.requires_grad, strict=True)
        ]


class ObservedFunctionCall:
    """A call that is about to be made; ``run`` makes it.

    Attributes:
        seconds, why_kept: What it took, and why what it makes must be saved ("" if it need not), where whoever ran it
            has found out; None elsewhere.
    """

    __slots__ = ("_how", "args", "function", "seconds", "tensors", "why_kept")

    def __init__(self, function: Any, args: tuple) -> None:
        self.function, self.args = function, args
        self.seconds: float | None = None
        self.why_kept: str | None = None
        self._how: CallOfFunction | None = None
        self.tensors = [a for a in args if isinstance(a, torch.Tensor)]  # in containers there may be more

    @property
    def name(self) -> str:
        """That of its op."""
        return name_of(self.function)

    @property
    def is_unseen(self) -> bool:
        """No operator of it shows, in backward neither, nor what it allocates."""
        return False

    @property
    def is_settled(self) -> bool:
        """Of a call that has returned: later ones of the kind run the same code. If not, nothing is learned from it."""
        return True

    @property
    def peak_bytes(self) -> int:
        """What it allocates that no operator shows, its results included; 0 where that is not known yet."""
        return 0

    @property
    def may_compile(self) -> bool:
        """Whether what it took may be mostly its compiler's, though the call is settled."""
        return False

    def uncompiled(self) -> AbstractContextManager[None]:
        """Inside, another run is compiled by nobody."""
        return nullcontext()

    @property
    def how(self) -> CallOfFunction:
        """What running it again needs."""
        if self._how is None:
            self._how = CallOfFunction(self.function, self.args)
        return self._how

    def run(self) -> Any:
        """What the call returns."""
        return super(_SingleLevelFunction, self.function).apply(*self.args)  # type: ignore[misc]

    def run_watched(self, watched: "ReportingFunctions", finished: Finished) -> Any:
        """The same; ``finished`` is called before autograd stores anything of it."""
        try:
            return super(_SingleLevelFunction, watched.of(self.function, finished)).apply(*self.args)  # type: ignore[misc]
        finally:
            watched.forget()


class ReportingFunctions:
    """Subclasses of Functions that tell what they returned, made once."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}
        self._finished: Finished | None = None  # of the call that runs next

    def of(self, function: Any, finished: Finished) -> Any:
        """``function`` as a class whose next call reports to ``finished``."""
        self._finished = finished
        if function not in self._made:
            self._made[function] = self._subclass(function)
        return self._made[function]

    def forget(self) -> None:
        """Report nothing any more."""
        self._finished = None

    def _tell(self, ctx: Any, output: Any) -> None:
        finished = self._finished
        if finished is not None:
            self.forget()
            finished(ctx, output)

    def _subclass(self, function: Any) -> Any:
        def forward(ctx: Any, *args: Any) -> Any:
            output = function.forward(ctx, *args)
            self._tell(ctx, output)
            return output

        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            function.setup_context(ctx, inputs, output)
            self._tell(ctx, output)

        telling = {"setup_context": setup_context} if _has_setup_context(function) else {"forward": forward}
        body = {name: staticmethod(method) for name, method in telling.items()}
        subclass = type(function)(function.__name__, (function,), {**body, "__module__": function.__module__})
        subclass._backward_cls = function._backward_cls
        return subclass


def _has_setup_context(function: Any) -> bool:
    return function.setup_context is not _SingleLevelFunction.setup_context


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    observer = _thread_state.observer
    if (
        observer is None
        or kwargs
        or not torch.is_grad_enabled()  # in another Function's forward, for example: part of that call
        or graph_task() != -1
        or (_BY_C and torch._C._are_functorch_transforms_active())  # before 2.14 such calls do not come here
        or cls.__module__.startswith(_NOT_SEEN)
    ):
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs)
    return observer.function(ObservedFunctionCall(cls, args))


# Dynamo leaves this frame alone, and compiles what it calls as ever.
set_code_exec_strategy(_apply.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


def install(thread_state: Any) -> Callable[[], None]:
    """Let the observer of ``thread_state`` see the calls of Functions; returns the undo.

    Under a version of PyTorch that nobody has checked they are not seen, and what they make is saved.
    """
    if is_unchecked(STEPS):
        return lambda: None
    global _installed, _thread_state
    if not _installed:
        _thread_state = thread_state
        _PLACE.apply = classmethod(_apply)
    _installed += 1
    done = False

    def undo() -> None:
        global _installed
        nonlocal done
        if not done:
            done = True
            _installed -= 1
            if not _installed:
                if _BY_C:
                    _PLACE.apply = _C_APPLY
                else:
                    del _PLACE.apply

    return undo


def is_call(frame: Any) -> bool:
    """Whether ``frame`` is of a Function's call, as far as calls are seen."""
    return frame.f_code is _apply.__code__


def looked_up_late(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``; where it is a ``F.apply`` that was bound before, one that looks ``apply`` up when it is called."""
    of = getattr(function, "__self__", None)
    if isinstance(of, type) and issubclass(of, Function) and getattr(function, "__name__", "") == "apply":
        return lambda *args, **kwargs: of.apply(*args, **kwargs)  # type: ignore[attr-defined]
    return function


# -- running a call again ------------------------------------------------------------------------------------------


class _StandIn(FunctionCtx):
    """A context that only takes down what ``forward`` stores."""

    to_save: tuple = ()

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad


def stored_and_returned(ctx: Any, output: Any) -> list[torch.Tensor]:
    """The tensors that a call stores, then those that it returned: an output of the op is one of these, by number."""
    return [*tensors_in(ctx.to_save or ()), *tensors_in(output)]


def run_again(call: CallOfFunction, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """``stored_and_returned`` of another run of ``call`` on ``tensors``, without a graph; the Function's own errors."""
    return call.run_again(tensors)


def _run_function_again(call: CallOfFunction, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    args = call.arguments(tensors)
    ctx = _StandIn(call.requires_grad)
    function: Any = call.function
    with torch.no_grad(), ExitStack() as stack:
        for device, dtype in call.autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
        if _has_setup_context(function):
            output = function.forward(*args)
            function.setup_context(ctx, tuple(args), output)
        else:
            output = function.forward(ctx, *args)
    return stored_and_returned(ctx, output)


def why_not_same(
    call: CallOfFunction,
    tensors: list[torch.Tensor],
    results: list[torch.Tensor],
    generators: GeneratorStates,
    buffers: list[torch.Tensor],
    *,
    own_memory: bool = False,
) -> str:
    """Run ``call`` again as a replay does; "" if all is the same, else what is not.

    Outputs, what it stores and inputs are compared. Generators and buffers are afterwards as they are now.

    Args:
        generators: Their states before the call that gave ``results``.
        own_memory: Each run has to make all but the inputs anew: a table that a Function keeps is no result of a run.
    """
    read = [fingerprint(t) for t in tensors]
    buffers_now = [b.clone() for b in buffers]
    given = [*tensors, *call.owned]
    hosts, own = HostGenerators(), call.own_generators
    own.note_states()
    reason = ""
    with _disable_current_modes(), below_autograd(), torch._C._DisableAutocast(), generators.restored():
        try:
            again = run_again(call, *tensors)
            if len(again) != len(results) or not all(map(same_bits, results, again)):
                reason = "gives other bits when it runs again"
            elif own_memory and any(_is_same_memory(a, b) and _is_new(a, given) for a, b in zip(results, again)):
                reason = ELSEWHERE
        except Exception as error:
            reason = f"cannot run again ({type(error).__name__}: {error})".splitlines()[0]
    if hosts.restore_if_moved():
        reason = "draws from Python's or NumPy's generator"
    reason = draws_from(own.restore_moved()) or reason
    if [fingerprint(t) for t in tensors] != read:
        reason = "writes its inputs in place"
    for buffer, before in zip(buffers, buffers_now, strict=True):
        if not same_bits(buffer, before):
            reason = "writes a buffer"
            with torch.no_grad():
                buffer.data.copy_(before)
    return reason


def _is_new(tensor: torch.Tensor, inputs: list[torch.Tensor]) -> bool:
    return tensor.numel() > 0 and not any(_is_same_memory(tensor, t) for t in inputs)


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    storage = storage_of(a)
    return storage is not None and storage is storage_of(b)
