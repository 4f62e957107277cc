"""Sees one step as it runs: operators, what autograd stores, module calls, checkpointed calls. Holds no tensor."""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _CachingTorchDispatchMode

from lowtide.device.autocast import casting_inside
from lowtide.doctor import checkpoint_seam
from lowtide.step import function_calls, module_calls
from lowtide.step.batches import batch_tensors
from lowtide.step.operators import draws_random_numbers, fingerprint, may_run_others, storage_of, tensors_in
from lowtide.step.other_generators import HostGenerators

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), str(Path(__file__).parent.parent))
_LIBRARIES = ("/site-packages/", "/dist-packages/")
_AROUND_THE_STEP = str(Path(__file__).parent / "step_under_test.py")
# Recomputing makes them anew, or leaves them out, where the values are the same.
EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
_NO_VALUE = EMPTY | {
    "aten::detach", "aten::alias", "aten::_to_copy", "aten::view", "aten::_unsafe_view", "aten::clone",
}  # fmt: skip


@dataclass(frozen=True)
class SeenOp:
    """An operator that ran inside a checkpointed call."""

    name: str
    path: str
    shapes: tuple[tuple[int, ...], ...]
    bits: tuple[Any, ...]  # a fingerprint of each result
    is_random: bool
    has_generator: bool
    line: str


@dataclass(eq=False)
class CheckpointCall:
    """One call of a checkpoint in the step.

    Attributes:
        path: Of the module that is checkpointed, or of the module that calls.
        parameters: Names of the trainable parameters inside.
        inputs_with_grad, inputs: Tensors among the arguments that require a gradient, and all.
        captured: Tensors with a history that the function brings along beside its arguments.
        caches: Lengths of KV caches inside, by name, after forward and after each recomputation.
        decisions: What a selective policy said, by operator; None without one.
        moved: Generators that the forward run has moved and that a checkpoint does not put back.
    """

    number: int
    path: str
    reentrant: bool
    preserve_rng_state: bool
    parameters: frozenset[str]
    inputs: int
    inputs_with_grad: int
    captured: int
    parent: "CheckpointCall | None"
    modules: tuple[str, ...]
    ops: list[SeenOp] = field(default_factory=list)
    recomputed: list[list[SeenOp]] = field(default_factory=list)
    decisions: Counter[tuple[str, str]] | None = None
    has_context: bool = False
    policy_names: tuple[str, ...] = ()
    moved: set[str] = field(default_factory=set)
    moved_again: set[str] = field(default_factory=set)
    cache_lengths: list[tuple[int, ...]] = field(default_factory=list)
    seen_caches: list[Any] = field(default_factory=list)
    line: str = ""

    @property
    def draws(self) -> bool:
        """Whether its forward draws random numbers from torch's own generators."""
        return any(op.is_random for op in self.ops)

    @property
    def divergence(self) -> tuple[SeenOp, SeenOp | None] | None:
        """The first op whose recomputation gave other bits, and what ran instead; None where all were the same."""
        if self.has_context:
            return None  # a policy keeps results, so that fewer ops run again
        forward = [op for op in self.ops if op.name not in _NO_VALUE]
        for run in self.recomputed:
            again = [op for op in run if op.name not in _NO_VALUE]
            for before, after in zip(forward, again):
                if (before.name, before.shapes, before.bits) != (after.name, after.shapes, after.bits):
                    return before, after
        return None


@dataclass(frozen=True)
class Stored:
    """A storage that autograd keeps for backward."""

    size_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    path: str
    producer: str  # the operator that wrote it last
    line: str
    cast_of: str = ""  # the parameter that it is a cast copy of


@dataclass(frozen=True)
class Held:
    """A storage of the step that outlives it.

    Attributes:
        line: In the user's own code, of the call that made it; in a library where none of theirs is inside the step.
    """

    size_bytes: int
    path: str
    line: str


class StepListener(TorchDispatchMode):
    """Everything that the checks share. Use ``watching()`` around a step.

    Args:
        compare: Take fingerprints of what checkpointed calls make.
        own_lines: Lines are those of the user's own code, not of the library that it calls.
    """

    def __init__(self, model: nn.Module, batch: Any, *, compare: bool, own_lines: bool = False) -> None:
        super().__init__()
        self._names = {id(m): n for n, m in model.named_modules(remove_duplicate=False)}
        self._trainable = {n for n, p in model.named_parameters() if p.requires_grad}
        self._parameters = {p.untyped_storage()._cdata: n for n, p in model.named_parameters() if storage_of(p)}
        there = (*model.parameters(), *model.buffers(), *batch_tensors(batch))
        self._residents = {s._cdata for t in there if (s := storage_of(t)) is not None}
        self._compare, self._find_line = compare, own_line if own_lines else user_line
        self._stack: list[str] = []
        self._active: list[tuple[CheckpointCall, list[SeenOp] | None]] = []
        self._producer: dict[int, tuple[str, str, str]] = {}  # storage -> op, path, line
        self._casts: dict[int, str] = {}
        self._made_in_calls: set[int] = set()  # storages
        self._alive: dict[int, tuple[weakref.ref, int, int]] = {}
        self._live_by_width: Counter[int] = Counter()
        self.calls: list[CheckpointCall] = []
        self.stored: dict[int, Stored] = {}
        self.in_backward = False
        self.called: Counter[str] = Counter()
        self.live_bytes = self.peak_bytes = 0
        self.peak_by_width: dict[int, int] = {}  # by size of the last dimension
        self.least_precise: torch.dtype = torch.float64
        self.backward_autocast = False
        self.cache_bytes = 0  # of a KV cache in the model's output
        self.nodes: set[str] = set()  # names of autograd's nodes

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, this thread's ops, calls and stored tensors are seen."""
        with ExitStack() as stack:
            stack.callback(torch_module.register_module_forward_pre_hook(self._enter).remove)
            stack.callback(torch_module.register_module_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(checkpoint_seam.observed_calls(self))
            stack.callback(function_calls.install(module_calls.thread_state))
            stack.enter_context(self)
            yield

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Around the forward pass: what autograd stores, outside of checkpointed calls."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    # -- module calls ---------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, _: Any) -> None:
        name = self._names.get(id(module))
        self._stack.append(self._stack[-1] if name is None and self._stack else name or "")
        if not self._active or self._active[-1][1] is self._active[-1][0].ops:
            self.called[self._stack[-1]] += 1

    def _leave(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()

    @property
    def path(self) -> str:
        return self._stack[-1] if self._stack else ""

    # -- operators ------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if may_run_others(func) and (casting := casting_inside()) is not None:
            with casting:
                return self.__torch_dispatch__(func, types, args, kwargs)
        result = func(*args, **kwargs)
        name = func._schema.name if hasattr(func, "_schema") else str(func)
        line = ""
        made = list(tensors_in(result))
        for tensor in made:
            storage = storage_of(tensor)
            if storage is None:
                continue
            line = line or ("" if self.in_backward and not self._active else self._find_line())
            known = storage._cdata in self._alive or storage._cdata in self._residents
            if not known:
                self._note_new(storage, tensor)
            if not known or func._schema.is_mutable:
                self._producer[storage._cdata] = (name, self.path, line)
                if self._active and tensor.is_floating_point():
                    self._made_in_calls.add(storage._cdata)
                else:
                    self._made_in_calls.discard(storage._cdata)
            if tensor.dtype.is_floating_point and torch.finfo(tensor.dtype).eps > torch.finfo(self.least_precise).eps:
                self.least_precise = tensor.dtype
        if name == "aten::_to_copy" and made and (storage := storage_of(args[0])) is not None:
            parameter, own = self._parameters.get(storage._cdata), storage_of(made[0])
            if parameter is not None and own is not None:
                self._casts[own._cdata] = parameter
        draws = torch.Tag.nondeterministic_seeded in func.tags and draws_random_numbers(func, args, kwargs)
        if self._active and self._active[-1][1] is not None:
            bits = tuple(fingerprint(t) for t in made) if self._compare else ()
            generator = any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values()))
            shapes = tuple(tuple(t.shape) for t in made)
            self._active[-1][1].append(SeenOp(name, self.path, shapes, bits, draws, generator, line or user_line()))
        return result

    def _note_new(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._casts.pop(key, None)  # of a copy that died and whose address this one has
        width = tensor.shape[-1] if tensor.dim() > 1 else 0

        def died(_: Any) -> None:
            if self._alive.pop(key, None) is not None:
                self.live_bytes -= size
                self._live_by_width[width] -= size

        self._alive[key] = weakref.ref(storage, died), size, width
        self.live_bytes += size
        self._live_by_width[width] += size
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.peak_by_width = dict(self._live_by_width)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = storage_of(tensor)
        if storage is not None and storage._cdata not in self._parameters and storage._cdata not in self.stored:
            producer = self._producer.get(storage._cdata, ("", "", ""))
            name = producer[0]
            if name in EMPTY and not _in_function():
                name = ""
            self.stored[storage._cdata] = Stored(
                storage.nbytes(), tuple(tensor.shape), tensor.dtype, self.path, name, producer[2] or user_line(),
                self._casts.get(storage._cdata, ""),
            )  # fmt: skip
        return tensor

    def held(self) -> list[Held]:
        """Storages made in the step that live now."""
        made = [(self._producer.get(key, ("", "", "")), size) for key, (_, size, _) in self._alive.items()]
        return [Held(size, path, line) for (_, path, line), size in made]

    # -- checkpointed calls ---------------------------------------------------------------------------------

    def begin(
        self, function: Any, args: tuple, kwargs: dict, *, reentrant: bool, preserve_rng_state: bool
    ) -> CheckpointCall | None:
        if not torch.is_grad_enabled():
            return None
        held = [*checkpoint_seam.held_by(function), *checkpoint_seam.held_by(kwargs)]
        modules = [m for m in held if isinstance(m, nn.Module)]
        named = [self._names[id(m)] for m in modules if id(m) in self._names]
        if not named:
            named = [self.path]
        prefixes = tuple(f"{n}." if n else "" for n in named)
        tensors = [t for t in tensors_in(args) if t.is_floating_point()]
        call = CheckpointCall(
            number=len(self.calls), path=named[0] if len(named) == 1 else self.path or named[0],
            reentrant=reentrant, preserve_rng_state=preserve_rng_state,
            parameters=frozenset(n for n in self._trainable if n.startswith(prefixes)),
            inputs=len(tensors), inputs_with_grad=sum(t.requires_grad for t in tensors),
            captured=sum(isinstance(t, torch.Tensor) and self._has_history(t) for t in held),
            parent=self._active[-1][0] if self._active else None, modules=tuple(named), line=user_line(),
            seen_caches=[c for c in [*held, *args] if hasattr(c, "get_seq_length")],
        )  # fmt: skip
        self.calls.append(call)
        return call

    def _has_history(self, tensor: torch.Tensor) -> bool:
        """Whether a backward should go on through it: a reentrant call returns what it stores elsewhere without."""
        storage = storage_of(tensor)
        return tensor.grad_fn is not None or (storage is not None and storage._cdata in self._made_in_calls)

    def contexts(self, call: CheckpointCall | None, contexts: Any) -> None:
        if call is None:
            return
        call.has_context = True
        for mode in contexts:
            if isinstance(mode, _CachingTorchDispatchMode):
                call.decisions = Counter() if call.decisions is None else call.decisions
                call.policy_names = _packets_in(mode.policy_fn)
                mode.policy_fn = _counting(mode.policy_fn, call.decisions)

    @contextmanager
    def running(self, call: CheckpointCall | None, *, again: bool = False) -> Iterator[None]:
        """While its function runs: in forward, or ``again`` when it is recomputed."""
        if call is None:
            yield
            return
        if again:
            call.recomputed.append([])
        before_draws = HostGenerators()
        self._active.append((call, call.recomputed[-1] if again else call.ops))
        try:
            yield
        finally:
            self._active.pop()
            moved = call.moved_again if again else call.moved
            moved |= before_draws.moved()
            call.cache_lengths.append(tuple(int(cache.get_seq_length()) for cache in call.seen_caches))


def frames() -> Iterator[Any]:
    """The frames that run now, from the caller's outwards."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_line() -> str:
    """``file.py:12`` of the innermost frame that is neither torch's nor lowtide's."""
    outside = (*_NOT_THE_USERS, "<frozen")
    return next((_line(f) for f in frames() if not f.f_code.co_filename.startswith(outside)), "")


def own_line() -> str:
    """``file.py:12`` of the innermost frame of the step that no library owns; ``user_line()`` where there is none."""
    for frame in frames():
        name = frame.f_code.co_filename
        if name == _AROUND_THE_STEP:
            break  # what lies further out called the doctor
        is_library = any(folder in name.replace("\\", "/") for folder in _LIBRARIES)
        if not is_library and not name.startswith((*_NOT_THE_USERS, "<frozen")):
            return _line(frame)
    return user_line()


def _line(frame: Any) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _in_function() -> bool:
    """Whether an autograd Function of the user's stores tensors now."""
    return any(map(function_calls.is_call, frames()))


def _counting(policy: Any, counts: Counter[tuple[str, str]]) -> Any:
    def counted(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        said = policy(ctx, op, *args, **kwargs)
        counts[str(op), "save" if said is True or "SAVE" in getattr(said, "name", "") else "recompute"] += 1
        return said

    return counted


def _packets_in(policy: Any) -> tuple[str, ...]:
    """Packets of operators that a policy compares with: an operator that runs never equals one."""
    found: list[str] = []
    items = checkpoint_seam.held_by(policy)
    for function in [policy, *items]:
        code = getattr(function, "__code__", None)
        if code is not None:
            items += [function.__globals__.get(n) for n in code.co_names if n in function.__globals__]
    for item in items:
        members = item if isinstance(item, (set, frozenset, list, tuple)) else [item]
        found += [str(m) for m in members if isinstance(m, torch._ops.OpOverloadPacket)]
    return tuple(dict.fromkeys(found))
