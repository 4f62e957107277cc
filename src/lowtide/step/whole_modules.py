"""Modules whose calls are one op each, run again as a whole as non-reentrant checkpointing does: those that the user
names, and those that are compiled.

    patterns -> paths (``matching``) -> ``called_whole``: module_calls.install puts a ``WholeCall`` on these modules
    a call   -> what autograd stores in it is put into boxes; when it returns, its observer gets all of that and
                the outputs, exactly as of a call of a Function; then the boxes are filled by the hooks around it
    again    -> the module's own call with detached arguments, and a graph that is thrown away: what autograd stores
                this time, in the same order, takes the place of what was dropped. The original graph's backward runs

The Python of the module runs once more in each proof and replay, hooks included; of a compiled module, its compiled
code. Random generators, autocast, train mode and buffers are then those of the forward pass, and afterwards as they
were.
"""

import difflib
import fnmatch
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr as get_sequence_nr
from torch._C._autograd import _top_saved_tensors_default_hooks as top_hooks
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.errors import ReplayError
from lowtide.graph.function_ops import MODULE, PREFIX
from lowtide.measurement.allocator import measuring, seen_on_cpu
from lowtide.step.autograd_leaves import nodes_since
from lowtide.step.bits import same_bits
from lowtide.step.deepspeed_engines import is_partitioned
from lowtide.step.function_calls import (
    TENSOR,
    CallOfFunction,
    Finished,
    ObservedFunctionCall,
    ReportingFunctions,
)
from lowtide.step.kinds_of_calls import Kind, layout_of, values_of
from lowtide.step.operators import tensors_in
from lowtide.step.subclasses import wrapped_parameters

_AUTOGRAD_KEYS = ("ADInplaceOrView", "AutogradOther", "AutogradNestedTensor", "AutogradFunctionality")
_nodes = threading.local()  # ``thrown_away``: of graphs of second runs
_settled: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_called_whole: weakref.WeakSet[nn.Module] = weakref.WeakSet()


# -- which modules -----------------------------------------------------------------------------------------------------


def matching(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Paths of the outermost modules whose names match one of ``patterns``.

    Raises:
        TypeError: ``patterns`` is one string, or holds something else.
        ValueError: one matches no module, or what it matches cannot be one op.
    """
    if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"opaque={patterns!r} is not a list of names. Pass opaque=['*.experts'], for example.")
    names = [path for path, _ in model.named_modules() if path]
    found: list[str] = []
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            near = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.0)
            raise ValueError(
                f"opaque={pattern!r} matches no module of this {type(model).__name__}.\n"
                f"  nearest  {', '.join(near) or 'there are no modules inside'}\n"
                "Name modules as model.named_modules() does; * stands for any text."
            )
        found += matched
    outermost = [p for p in dict.fromkeys(found) if not any(p.startswith(f"{q}.") for q in found)]
    if outermost and wrapped_parameters(model):
        raise ValueError("opaque= names modules of a sharded model, whose parameters come and go. Leave it out.")
    return outermost


@contextmanager
def called_whole(model: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Inside, calls of these modules of ``model`` are one op each, wherever its calls are observed."""
    new = weakref.WeakSet(m for m in map(model.get_submodule, paths) if m not in _called_whole)
    _called_whole.update(new)
    del model  # a fit is inside for as long as the model lives, and must not be why it does
    try:
        yield
    finally:
        if _called_whole is not None:  # the interpreter ends
            for module in new:
                _called_whole.discard(module)


def is_called_whole(module: nn.Module) -> bool:
    return module in _called_whole


# -- a call ------------------------------------------------------------------------------------------------------------


class CompiledCode:
    """Calls a module that is compiled. No dispatcher sees what happens inside.

    Attributes:
        peak_bytes: What a call allocated at most, by place (``Kind``); a call that compiles counts for nothing.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.peak_bytes: dict[tuple, int] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return self._call(*args, **kwargs)

    def run_again(self, place: tuple, device: torch.device, args: Any, kwargs: Any) -> Any:
        """The same of a call that has compiled by now."""
        is_known = place in self.peak_bytes
        with measuring("cpu" if is_known else device) as counter:  # see ``seen_on_cpu``
            result = self(*args, **kwargs)
        if counter is not None and not is_known:
            self.peak_bytes[place] = counter.peak
        return result


class CallOfModule(CallOfFunction):
    """How one call of a module was made: all that running it again needs beside the tensors that it was given.

    Attributes:
        stays_whole: Its operators never say all: the user asked for one op.
    """

    __slots__ = ("_changed", "_compiled", "_given", "_modes", "_module", "_unchanged")
    stays_whole = True

    def __init__(self, module: nn.Module, args: tuple, compiled: CompiledCode | None = None) -> None:
        super().__init__(type(module), tuple(tensors_in(args)))
        self._module, self._compiled = module, compiled
        self._given = _without_tensors(args)
        self._modes = [(m, m.training) for m in module.modules()]
        self._changed: list[tuple[torch.Tensor, torch.Tensor]] = []  # buffers that it writes, and copies from before
        self._unchanged: list[tuple[torch.Tensor, int]] = []  # the others, with their versions

    def kind(self, args: tuple) -> Kind:
        training = tuple(training for _, training in self._modes)
        layouts = layout_of((self._given, *tensors_in(args)))
        module = weakref.ref(self._module)
        place = (module, self.requires_grad, self.autocast, self.flags, training, layouts)
        return Kind(place, values_of(self._given))

    @property
    def restores(self) -> Sequence[torch.Tensor]:
        return [buffer for buffer, _ in self._changed]

    @property
    def owned(self) -> Sequence[torch.Tensor]:
        return list(self._module.buffers())

    def note_buffers(self, before: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The call has returned; ``before``: the buffers and what was in them."""
        for buffer, copy in before:
            if same_bits(buffer, copy):
                self._unchanged.append((buffer, buffer._version))
            else:
                self._changed.append((buffer, copy))

    def _roots(self) -> Iterator[tuple[str, Any]]:
        yield type(self._module).__qualname__, self._module
        yield from ((getattr(a, "__name__", ""), a) for a in self._given_beside_tensors() if callable(a))

    def _given_beside_tensors(self) -> Iterator[Any]:
        yield from (a for a in _leaves(self._given) if a is not TENSOR)

    def run_again(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for buffer, version in self._unchanged:
            if buffer._version != version:
                raise ReplayError(
                    f"{type(self._module).__qualname__} cannot run again: a buffer of shape {list(buffer.shape)} was "
                    "changed in place after the call.\nChange it before the forward pass or after backward."
                )
        args, kwargs, parameters = _with_tensors(self._given, iter(self.arguments(tensors)))
        stored: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> None:
            stored.append(tensor.detach())

        first_node = get_sequence_nr()
        with ExitStack() as stack:
            stack.callback(lambda: _note_thrown_away(get_sequence_nr() - first_node))
            stack.enter_context(_autograd_on())
            stack.enter_context(torch.enable_grad())
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            stack.enter_context(self._as_before(parameters))
            stack.enter_context(saved_tensors_hooks(pack, _never_unpacked))
            if self._compiled is None:
                output = self._module._call_impl(*args, **kwargs)
            else:
                output = self._compiled.run_again(self.kind(tuple(tensors)).place, tensors[0].device, args, kwargs)
        return [*stored, *(t.detach() for t in tensors_in(output))]

    @contextmanager
    def _as_before(self, parameters: list[torch.Tensor]) -> Iterator[None]:
        """Inside, train mode, buffers and the memory of parameters are those of the call."""
        modes = [(m, m.training) for m, _ in self._modes]
        buffers = [(buffer, buffer.clone()) for buffer, _ in self._changed]
        moved = [
            (p, p.data)
            for p, given in zip(self._module.parameters(), parameters, strict=True)
            if p.data_ptr() != given.data_ptr()
        ]
        _put_modes(self._modes)
        _put(self._changed)
        for parameter, given in zip(self._module.parameters(), parameters, strict=True):
            if parameter.data_ptr() != given.data_ptr():
                parameter.data = given.detach()
        try:
            yield
        finally:
            _put_modes(modes)
            _put(buffers)
            for parameter, data in moved:
                parameter.data = data


class ObservedModuleCall(ObservedFunctionCall):
    """A call of a module that is one op."""

    __slots__ = ("_compiled", "_kwargs", "_module", "_positional")

    def __init__(self, module: nn.Module, args: tuple, kwargs: dict, compiled: CompiledCode | None = None) -> None:
        super().__init__(type(module), (args, kwargs))
        self._module, self._positional, self._kwargs, self._compiled = module, args, kwargs, compiled
        # Parameters too: a replay must not read those of a later step.
        self.tensors = [*tensors_in(self.args), *module.parameters()]

    @property
    def name(self) -> str:
        kind = type(self._module)
        return f"{PREFIX}{kind.__qualname__.replace('.<locals>', '').replace('.', '_')}{MODULE}{kind.__module__}"

    @property
    def how(self) -> CallOfFunction:
        if self._how is None:
            self._how = CallOfModule(self._module, (*self.args, list(self._module.parameters())), self._compiled)
        return self._how

    @property
    def is_unseen(self) -> bool:
        return self._compiled is not None

    @property
    def is_settled(self) -> bool:
        return not is_scripted(self._module) or _is_settled(self._module)

    @property
    def peak_bytes(self) -> int:
        return (
            0 if self._compiled is None else self._compiled.peak_bytes.get(self.how.kind(tuple(self.tensors)).place, 0)
        )

    @property
    def may_compile(self) -> bool:
        """TorchScript optimizes code anew for other shapes, and in the second call of each, which takes 20 to 500 times
        what the code takes."""
        return is_scripted(self._module)

    def uncompiled(self) -> AbstractContextManager[None]:
        return torch.jit.optimized_execution(False)

    def run(self) -> Any:
        call = self._module._call_impl if self._compiled is None else self._compiled
        return call(*self._positional, **self._kwargs)

    def run_watched(self, watched: ReportingFunctions, finished: Finished) -> Any:
        hooks = top_hooks(True)
        before = [(b, b.detach().clone()) for b in self._module.buffers()]
        boxes: list[_Box] = []

        def pack(tensor: torch.Tensor) -> _Box:
            boxes.append(_Box(tensor))
            return boxes[-1]

        try:
            first_node = get_sequence_nr()
            with saved_tensors_hooks(pack, _Box.unpacked), seen_on_cpu(self._compiled is not None):
                output = self.run()
            if self._compiled is not None:  # the compiler makes nodes, too
                num_left = sum(1 for _ in nodes_since(first_node, list(tensors_in(output))))
                _note_thrown_away(get_sequence_nr() - first_node - num_left)
            how = self.how
            assert isinstance(how, CallOfModule)
            how.note_buffers(before)
            finished(_Stored(tuple(box.tensor for box in boxes)), output)
        finally:
            for box in boxes:
                box.hand_on(hooks)
        return output


class WholeCall:
    """Calls a module as one op of the thread's observer.

    Args:
        compiled: How to call it, if it is compiled.
    """

    __slots__ = ("_compiled", "_module", "_thread_state", "path")
    lowtide = True

    def __init__(
        self, module: nn.Module, path: str, thread_state: Any, compiled: Callable[..., Any] | None = None
    ) -> None:
        self._module, self.path, self._thread_state = weakref.ref(module), path, thread_state
        self._compiled = None if compiled is None else CompiledCode(compiled)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None  # it is running
        call = self._compiled or module._call_impl
        observer = self._thread_state.observer
        if observer is None:
            return call(*args, **kwargs)
        if self._compiled is not None and (wrapped_parameters(module) or is_partitioned(module.parameters())):
            return self._unplanned(observer, module, partial(self._compiled, *args, **kwargs), (args, kwargs))
        observer.enter(self.path)
        try:
            if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
                return call(*args, **kwargs)
            with self._thread_state.observed_by(None):  # the calls inside are nobody's
                return observer.function(ObservedModuleCall(module, args, kwargs, self._compiled))
        finally:
            observer.leave()

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    def _unplanned(self, observer: Any, module: nn.Module, run: Callable[[], Any], given: Any) -> Any:
        """Compiled code whose parameters come and go: what it stores is saved."""
        with self._thread_state.observed_by(None):
            return observer.opaque(self.path, module, run, list(tensors_in(given)))


def is_scripted(module: nn.Module) -> bool:
    """``torch.jit.script`` or ``torch.jit.trace`` made it."""
    return isinstance(module, torch.jit.ScriptModule)


def _is_settled(module: Any) -> bool:
    """Whether TorchScript has optimized the code of ``module``, as it does in the first calls; then it stays so."""
    if module not in _settled:
        try:
            module._c.get_debug_state()
        except RuntimeError:
            return False
        _settled.add(module)
    return True


def calls_compiled_code(module: nn.Module) -> bool:
    """Whether calls of ``module`` are observed as calls of compiled code."""
    call = module._compiled_call_impl
    return isinstance(call, WholeCall) and call.is_compiled


# -- what autograd stores ----------------------------------------------------------------------------------------------


class _Box:
    """What autograd holds while the call runs; afterwards, what the hooks around the call gave."""

    __slots__ = ("_packed", "_unpack", "_version", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor = tensor
        self._version = tensor._version
        self._packed: Any = None
        self._unpack: Callable[[Any], torch.Tensor] | None = None

    def hand_on(self, hooks: tuple | None) -> None:
        """The call is over. The tensor itself would make a cycle through its autograd node."""
        tensor = self.tensor
        if hooks is None or tensor._version != self._version:
            self._packed = tensor.detach()
        else:
            self._packed, self._unpack = hooks[0](tensor), hooks[1]
        del self.tensor

    def unpacked(self) -> torch.Tensor:
        if self._packed is None:
            return self.tensor
        if self._unpack is not None:
            return self._unpack(self._packed)
        if self._packed._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._packed.type()} {list(self._packed.shape)}] is at version {self._packed._version}; "
                f"expected version {self._version} instead."
            )
        found: torch.Tensor = self._packed
        return found


class _Stored:
    """What a call's observer gets in place of a Function's context. Has no attributes of its own to look through."""

    __slots__ = ("__dict__", "dirty_tensors", "to_save")

    def __init__(self, to_save: tuple[torch.Tensor, ...]) -> None:
        self.to_save, self.dirty_tensors = to_save, None


def num_nodes_thrown_away() -> int:
    """How many nodes of autograd second runs of modules have made on this thread."""
    return getattr(_nodes, "thrown_away", 0)


def _note_thrown_away(count: int) -> None:
    _nodes.thrown_away = num_nodes_thrown_away() + count


def _never_unpacked(_: Any) -> torch.Tensor:
    raise ReplayError("the graph of a call that was run again has no backward.\nThis is a bug in lowtide.")


# -- arguments and state -----------------------------------------------------------------------------------------------


def _without_tensors(value: Any) -> Any:
    """A copy of lists, tuples and dicts with ``TENSOR`` in place of tensors."""
    if isinstance(value, torch.Tensor):
        return TENSOR
    if type(value) in (list, tuple):
        return type(value)(map(_without_tensors, value))
    if type(value) is dict:
        return {name: _without_tensors(v) for name, v in value.items()}
    return value


def _with_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if value is TENSOR:
        return next(tensors)
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(v, tensors) for v in value)
    if type(value) is dict:
        return {name: _with_tensors(v, tensors) for name, v in value.items()}
    return value


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) in (list, tuple):
        for item in value:
            yield from _leaves(item)
    elif type(value) is dict:
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def _put_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        if module.training is not training:
            module.training = training


def _put(buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write contents that no version shows: nothing else reads them meanwhile."""
    with torch.no_grad():
        for buffer, content in buffers:
            with _unsafe_preserve_version_counter(buffer):
                buffer.copy_(content)


@contextmanager
def _autograd_on() -> Iterator[None]:
    """Inside, operators build a graph, also where replays run, which is below autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in _AUTOGRAD_KEYS:
        with suppress(AttributeError):
            excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield
