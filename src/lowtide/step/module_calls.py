"""Which module call an op runs in: a guarded callable in every submodule's ``_compiled_call_impl``.

``nn.Module.__call__`` looks there first, so no class, parameter name or state dict changes; deepcopy and pickle
drop it (``Module.__getstate__`` does), and ``try/finally`` holds where forward hooks do not (KeyboardInterrupt
leaves an ``always_call`` hook's mode on).
"""

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from lowtide.device.names import autocast_types
from lowtide.step import function_calls
from lowtide.step.operators import tensors_in
from lowtide.step.sharding.observer import ShardingObserver, observe_units
from lowtide.step.sharding.zero3 import observe_windows
from lowtide.step.whole_modules import WholeCall, is_called_whole

_COMPILED = frozenset({"OptimizedModule", "ScriptModule"})
NO_GRAD = "(no gradients)"  # a frame for calls of the model itself without gradients: seen by a trace, never taped
Function = TypeVar("Function", bound=Callable[..., Any])


def never_compiled(function: Function) -> Function:
    """Decorator: Dynamo leaves this function and all that it calls alone.

    While compiled code runs Dynamo compiles every Python frame that comes up, hooks and weakref callbacks included. Its
    own ``disable`` would import the compiler.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


def stash_in_tls(key: str, value: object) -> None:
    """Keep ``value`` in PyTorch's state of this thread, and of those that the engine hands it to, until they end.

    PyTorch 2.11 does not count the reference that it keeps there, but does give it back: that one is counted here.
    """
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(key, value)
    if sys.getrefcount(value) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


class CallObserver(Protocol):
    """Gets each module call's start and end: the tracer's recorder, or the tape."""

    def enter(self, path: str) -> None: ...
    def leave(self) -> None: ...
    def opaque(self, path: str, module: nn.Module, run: Callable[[], Any], inputs: list[torch.Tensor]) -> Any: ...
    def function(self, call: function_calls.ObservedFunctionCall) -> Any: ...
    @property
    def sharding_observer(self) -> ShardingObserver | None: ...


@dataclass
class _State:
    observer: CallObserver | None = None
    fitted_calls: int = 0


class _ThreadState:
    """What holds for one thread: another thread's forward is not this step's.

    It lies in PyTorch's state of the thread, not in Python's: the engine hands that on to the device's thread, in which
    backward runs on an accelerator and FSDP gathers and frees parameters.

    Attributes:
        observer: Of the module calls of this thread.
        fitted_calls: Of fitted models that run.
    """

    _KEY = "lowtide.step.thread_state"

    def _of_this_thread(self) -> _State:
        try:  # asking first would double what each module call of a step takes here
            return torch._C._get_obj_in_tls(self._KEY)
        except RuntimeError:
            stash_in_tls(self._KEY, _State())
            return torch._C._get_obj_in_tls(self._KEY)

    @property
    def observer(self) -> CallObserver | None:
        return self._of_this_thread().observer

    @observer.setter
    def observer(self, observer: CallObserver | None) -> None:
        self._of_this_thread().observer = observer

    @property
    def fitted_calls(self) -> int:
        return self._of_this_thread().fitted_calls

    @fitted_calls.setter
    def fitted_calls(self, count: int) -> None:
        self._of_this_thread().fitted_calls = count

    @contextmanager
    def observed_by(self, observer: CallObserver | None) -> Iterator[None]:
        """Inside, this thread's calls are told to ``observer``; None: to nobody."""
        outer, self.observer = self.observer, observer
        try:
            yield
        finally:
            self.observer = outer


thread_state = _ThreadState()


class ObservedCall:
    """Calls the module as before, and reports the call's start and end to the thread's observer."""

    __slots__ = ("_module", "path")

    def __init__(self, module: nn.Module, path: str) -> None:
        self._module = weakref.ref(module)  # strong would make a cycle through the module and delay its memory
        self.path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None  # it is running
        observer = thread_state.observer
        if observer is None:
            return module._call_impl(*args, **kwargs)
        observer.enter(self.path)
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            observer.leave()


class CompiledCall:
    """Calls compiled code; the thread's observer takes the whole call as one op, whose inside is not seen."""

    __slots__ = ("_module", "before", "path")

    def __init__(self, module: nn.Module, path: str) -> None:
        self._module, self.path = weakref.ref(module), path
        self.before = module._compiled_call_impl  # None for the wrapper that ``torch.compile`` returns

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        run = partial(self.before or module._call_impl, *args, **kwargs)
        observer = thread_state.observer
        if observer is None:
            return run()
        with thread_state.observed_by(None):
            return observer.opaque(self.path, module, run, list(tensors_in((args, kwargs))))


def is_lowtide_call(call: Any) -> bool:
    """What a fitted model, or a part of one, has in place of its own call."""
    return isinstance(call, (ObservedCall, CompiledCall)) or bool(getattr(call, "lowtide", False))


def is_compiled(module: nn.Module) -> bool:
    """``module.compile()`` was called, or ``torch.compile`` or ``torch.jit`` returned it."""
    call = module._compiled_call_impl
    by_method = call is not None and not is_lowtide_call(call)
    return by_method or not _COMPILED.isdisjoint(c.__name__ for c in type(module).__mro__)


def is_pytorchs_own(module: nn.Module) -> bool:
    """Its ``forward`` is PyTorch's own code, at which Dynamo begins no frame: ``module.compile()`` compiles nothing but
    modules of others inside (pytorch#150915)."""
    return str(getattr(module.forward, "__module__", "")).startswith("torch.")


def compiled_parts(model: nn.Module) -> list[str]:
    """Paths of the outermost compiled modules."""
    found: list[str] = []
    for path, module in model.named_modules():
        if is_compiled(module) and not any(not outer or path.startswith(f"{outer}.") for outer in found):
            found.append(path)
    return found


def compiled_call_of(module: nn.Module, path: str = "") -> CompiledCall | None:
    """How to call a module that is compiled; None for any other."""
    return CompiledCall(module, path) if is_compiled(module) else None


def install(model: nn.Module, root: Callable[..., Any]) -> Callable[[], None]:
    """Put an ``ObservedCall`` on every submodule, ``root`` on the model itself; returns the undo."""
    placed: list[tuple[weakref.ref[nn.Module], Any, Any]] = []
    compiled = compiled_parts(model)
    inside = tuple(f"{path}." if path else "" for path in compiled)
    for path, module in model.named_modules():
        if path.startswith(inside) and path not in compiled:
            continue
        call = root if module is model else _call_in_place(module, path)
        placed.append((weakref.ref(module), call, module._compiled_call_impl))
        module._compiled_call_impl = call
    stop_observing = observe_units(model, thread_state), observe_windows(model, thread_state)
    stop_seeing_functions = function_calls.install(thread_state)

    def undo() -> None:
        for stop in (*stop_observing, stop_seeing_functions):
            stop()
        for reference, call, before in placed:
            module = reference()
            if module is not None and module._compiled_call_impl is call:
                module._compiled_call_impl = before

    return undo


def _call_in_place(module: nn.Module, path: str) -> ObservedCall | WholeCall:
    if is_compiled(module):
        compiled = module._compiled_call_impl
        return WholeCall(module, path, thread_state, compiled or module._call_impl)
    return WholeCall(module, path, thread_state) if is_called_whole(module) else ObservedCall(module, path)


def call_signature(model: nn.Module, args: tuple, kwargs: dict) -> str:
    """What decides which ops a call runs, as text: shapes, dtypes, flags, words, training flag, autocast.

    Numbers are left out: they may count up or be annealed, and whether one changes the ops, the op sequence shows. So
    are words in lists: those are of samples, as names of their files.
    """
    parts = ["train" if model.training else "eval"]
    for device in autocast_types():
        if torch.is_autocast_enabled(device):
            parts.append(f"autocast({device},{_short(torch.get_autocast_dtype(device))})")
    parts += [_describe(a) for a in args]
    parts += [f"{name}={_describe(kwargs[name])}" for name in sorted(kwargs)]
    parts += ["nothing masked"] * masks_nothing(kwargs)
    return " ".join(parts)


def masks_nothing(kwargs: dict) -> bool:
    """Whether transformers leaves the call's attention mask away, because all of it is ones: then other ops run."""
    mask: Any = kwargs.get("attention_mask")
    if type(mask) is not torch.Tensor or mask.ndim != 2 or mask.is_floating_point() or mask.is_meta:
        return False
    with torch._C._DisableTorchDispatch():  # not an op of the step
        return bool(mask.all())


def _describe(value: Any, *, in_list: bool = False) -> str:
    if isinstance(value, torch.Tensor):
        grad = "*" if value.requires_grad else ""
        return f"{_short(value.dtype)}{list(value.shape)}{grad}".replace(" ", "")
    if isinstance(value, (list, tuple)):
        return "(" + ",".join(_describe(v, in_list=True) for v in value) + ")"
    if isinstance(value, dict) or hasattr(value, "items"):
        return "{" + ",".join(f"{k}:{_describe(v, in_list=in_list)}" for k, v in value.items()) + "}"
    if isinstance(value, str):
        return "word" if in_list else repr(value)
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, (int, float)):
        return "number"
    return type(value).__name__


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
