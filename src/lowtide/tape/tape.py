"""The tape: carries a plan out in one forward pass, and answers autograd when backward asks.

A dispatch mode sees each op below autograd and autocast; where the plan drops an output, a recipe is left. A pair
of saved-tensor hooks gives autograd a value for each dropped tensor and the tensor itself, with its version, for
each kept one. Ops are matched by name and order within their module call; what does not match is saved and counted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch._C import _current_graph_task_id as graph_task
from torch._C import _storage_Use_Count as use_count
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lowtide.tape.execution_state import ExecutionState, GeneratorState
from lowtide.tape.offload.offloaded_tensor import OffloadedTensor, Transfers
from lowtide.tape.offload.tiers import Tiers
from lowtide.tape.program import Move, Node, Program, Slot
from lowtide.tape.recipes import Recipe, nth_tensor
from lowtide.tape.replay import unpacked
from lowtide.tape.values import (
    MARK,
    Kept,
    Value,
    View,
    detached,
    placeholder_for,
    sharing_version,
    value_of,
    views_a_leaf,
)
from lowtide.tracing import module_calls
from lowtide.tracing.fsdp.observer import PauseDuringFsdp
from lowtide.tracing.operators import (
    allocated_bytes,
    draws,
    is_wrapper_type,
    storage_of,
    written_arguments,
    written_tensors,
)
from lowtide.tracing.subclasses import PackedWrapper, bump_versions_of_parts, fake_mode_is_on, wrapped_parameters

_FRESH = 2  # references to the memory of a tensor nobody else has: its own and that of the storage's Python object


@dataclass
class Counts:
    """What the tape met, over all steps.

    Attributes:
        steps: Forward passes taped.
        dropped: Tensors left as recipes. ``moved``: to another tier.
        mismatched: Planned ops that did not come, came in another form, or could not be dropped: saved instead.
        unplanned: Ops where the plan has none (a loss outside the model, say): saved.
    """

    steps: int = 0
    dropped: int = 0
    moved: int = 0
    mismatched: int = 0
    unplanned: int = 0


class _Frame:
    __slots__ = ("calls", "next", "node")

    def __init__(self, node: Node | None) -> None:
        self.node = node
        self.next = 0
        self.calls: dict[str, int] | None = None


class Audit:
    """Which dropped tensors are kept beside their recipes in this pass, to be compared at replay.

    Attributes:
        allowance_bytes: How much may be kept beside.
        differed: Slots whose replay differed; they are saved from then on.
    """

    def __init__(self, program: Program, allowance_bytes: int, on_difference: Callable[[Slot], None]) -> None:
        self.left = allowance_bytes
        self.on_difference = on_difference
        self.pending = {id(s) for s in program.unaudited()}

    def wants(self, slot: Slot, size: int) -> bool:
        if id(slot) not in self.pending or size > self.left:
            return False
        self.left -= size
        return True

    def result(self, slot: Slot, equal: bool) -> None:
        slot.audited = True
        if not equal:
            slot.drops = ()
            self.on_difference(slot)


class Tape(TorchDispatchMode):
    """One program on one model. ``with tape.region(node)`` tapes what runs forward inside."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper PyTorch puts around a mode otherwise imports the compiler and costs microseconds an op.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else compiled code under the mode silently runs as eager

    def __init__(self, program: Program, model: nn.Module, tiers: Tiers | None = None) -> None:
        super().__init__()
        self.program = program
        self.tiers = tiers or {}
        self._transfers: Transfers | None = None  # of the present forward pass, if the plan moves anything
        self._model = weakref.ref(model)
        self.counts = Counts()
        self.audit: Audit | None = None
        self.beside_bytes = 0  # of moved tensors that may stay beside their copies, to be compared with them
        self.free = threading.Lock()  # held while a call of the model is taped: one forward pass at a time
        self._frame = _Frame(None)
        self._stack: list[_Frame] = []
        self._marked: list[weakref.ref] = []
        self._run = ExecutionState(self._model)  # the present forward pass
        self._outer: Any = None
        self._number = 0
        self._off = 0
        self._step_over = False  # in a region that holds whole steps: backward has begun
        self._whole_step = False
        self._wrapped = bool(wrapped_parameters(model))

    # -- regions ------------------------------------------------------------------------------------------------

    def region(self, node: Node, *, whole_step: bool) -> _Region:
        """Tape what runs inside as ``node``; ``whole_step`` regions may hold several steps, backward included."""
        return _Region(self, node, whole_step)

    def begin(self, node: Node) -> None:
        """A new forward pass starts."""
        self._frame, self._stack = _Frame(node), []
        self._run = ExecutionState(self._model, wrapped=self._wrapped)
        self._number = 0
        self._step_over = False
        if self.program.plan.tiers:
            if self._transfers is not None:
                self._transfers.settle()  # a pass whose backward is still to come, or never comes
            self._transfers = Transfers(self.tiers, self.program.plan.max_inflight_bytes)
        self.counts.steps += 1

    def end(self) -> None:
        """The forward pass is over: storages that still live stop holding their recipes, which hold kept tensors."""
        for reference in self._marked:
            storage = reference()
            if storage is not None:
                storage.__dict__.pop(MARK, None)
        self._marked = []

    # -- module calls -------------------------------------------------------------------------------------------

    def enter(self, path: str) -> None:
        if self._step_over and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._next_step()
        frame = self._frame
        node = None
        if frame.node is not None:
            called = frame.calls
            if called is None:
                called = frame.calls = {}
            ordinal = called.get(path, 0)
            called[path] = ordinal + 1
            calls = frame.node.children.get(path)
            if calls is not None and ordinal < len(calls):
                node = calls[ordinal]
        self._stack.append(frame)
        self._frame = _Frame(node)

    def leave(self) -> None:
        frame = self._frame
        self._close(frame)
        self._frame = self._stack.pop()

    def _close(self, frame: _Frame) -> None:
        node = frame.node
        if node is not None and node.planned and frame.next < len(node.slots):
            self.counts.mismatched += sum(bool(s.drops or s.moves) for s in node.slots[frame.next :])
            frame.next = len(node.slots)

    def opaque(self, path: str, module: nn.Module, run: Callable[[], Any], inputs: list[torch.Tensor]) -> Any:
        """A call of compiled code: no operator of it is watched, what autograd stores of it is kept."""
        self.enter(path)
        try:
            with _disable_current_modes():
                return run()
        finally:
            self.leave()

    def pause(self) -> None:
        """What runs until ``resume`` is not part of the step (a pass without gradients, say)."""
        self._off += 1

    def resume(self) -> None:
        self._off -= 1

    @property
    def fsdp_observer(self) -> PauseDuringFsdp:
        """FSDP's own work, in forward and in backward, is no part of the step."""
        return PauseDuringFsdp(self)

    def _next_step(self) -> None:
        self.end()
        self.begin(self.program.root)

    # -- operators ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if (
            types and not fake_mode_is_on() and any(map(is_wrapper_type, types))
        ):  # what it does to their parts comes here by itself
            bump_versions_of_parts(func, args, kwargs or {})
            return NotImplemented
        if graph_task() != -1 or self._off or (self._wrapped and fake_mode_is_on()):
            return func(*args, **kwargs) if kwargs else func(*args)
        if self._step_over:
            if not torch.is_grad_enabled():  # the optimizer's own work between two steps
                return func(*args, **(kwargs or {}))
            self._next_step()
        frame = self._frame
        node = frame.node
        if node is not None:
            if not node.planned:
                return func(*args, **kwargs) if kwargs else func(*args)
            if frame.next < len(node.slots):
                slot = node.slots[frame.next]
                if slot.func is func or slot.names(func):
                    frame.next += 1
                    if slot.moves:
                        return self._move(slot, args, kwargs or {})
                    if slot.drops:
                        return self._record(slot, args, kwargs or {})
                    if slot.completes_inplace is not None:
                        return self._extend(slot, args, kwargs or {})
                    return slot.kernel(*args, **kwargs) if kwargs else slot.kernel(*args)
            if func.namespace == "profiler":  # FSDP names what it does; no op of the step
                return func(*args, **(kwargs or {}))
            self._close(frame)  # not the planned ops: the rest of this module call is saved
        self.counts.unplanned += 1
        _forget_what_it_writes(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _record(self, slot: Slot, args: tuple, kwargs: dict) -> Any:
        run = self._run
        recipe = Recipe(self._number, slot, args, kwargs, run)
        self._number += 1
        needs = slot.needs
        if needs and (len(recipe.inputs) < needs or (needs > 1 and len(set(recipe.inputs)) < needs)):
            self.counts.mismatched += 1  # the recipe would hold an input that the plan counts as gone
            return slot.kernel(*args, **kwargs)
        if slot.random and draws(slot.func, args, kwargs):
            made_on = torch.device(kwargs.get("device") or "cpu")  # a factory has no tensor to tell
            device = next((a.device for a in args if isinstance(a, torch.Tensor)), made_on)
            recipe.rng = GeneratorState(device)
        result = slot.kernel(*args, **kwargs) if kwargs else slot.kernel(*args)
        alone = len(slot.drops) == 1
        outputs: list[weakref.ref[Value]] = []
        for output, size in slot.drops:
            tensor = result if type(result) is torch.Tensor else nth_tensor(result, output)
            storage = tensor.untyped_storage()
            beside = storage.__dict__
            unlike = storage.nbytes() != size and allocated_bytes(storage) != size and not slot.dynamic
            if unlike or MARK in beside or (use_count(storage._cdata) > _FRESH and _is_among(storage, args)):
                self.counts.mismatched += 1
                continue
            if alone:
                value: Value = recipe
                recipe.begin(output, tensor)
            else:
                value = Value(recipe, output, tensor, run)
                outputs.append(weakref.ref(value))
            beside[MARK] = value
            self._marked.append(weakref.ref(storage))
            self.counts.dropped += 1
            if self.audit is not None and self.audit.wants(slot, size):
                value.original = sharing_version(tensor)
                recipe.on_audit = partial(self.audit.result, slot)
        if not alone:
            recipe.outputs = outputs
        return result

    def _extend(self, slot: Slot, args: tuple, kwargs: dict) -> Any:
        """An in-place op on a dropped output that nothing has read yet becomes part of its recipe."""
        if MARK not in args[0].untyped_storage().__dict__:
            return slot.func(*args, **kwargs)  # that output of the op is kept, another is dropped
        value = value_of(args[0], self._run)
        recipe = None if value is None else value.recipe
        # Somebody holds it already as it is now: what they get back must not be finished.
        held = value is not None and value.users > 0
        if value is None or recipe is None or held or recipe.inputs_later_than(args[1:], kwargs, self._run):
            self.counts.mismatched += 1
            return slot.func(*args, **kwargs)
        rng = GeneratorState(args[0].device) if slot.random else None
        recipe.extend(slot.func, args, kwargs, value, self._run, rng)
        result = slot.func(*args, **kwargs)
        value.version += 1  # the counter moves once this call has returned; any other write makes them differ
        return result

    def _move(self, slot: Slot, args: tuple, kwargs: dict) -> Any:
        """As planned otherwise, and what is moved sets out."""
        if slot.drops:
            result = self._record(slot, args, kwargs)
        elif slot.completes_inplace is not None:
            result = self._extend(slot, args, kwargs)
        else:
            result = slot.kernel(*args, **kwargs)
        for move in slot.moves:
            if slot.completes:  # in place: the counter moves once this call has returned
                self._send(slot, move, args[0], args[0]._version + 1)
            else:
                tensor = nth_tensor(result, move.output)
                if _is_among(tensor.untyped_storage(), args):
                    self.counts.mismatched += 1
                else:
                    self._send(slot, move, tensor, tensor._version)
        return result

    def _send(self, slot: Slot, move: Move, tensor: torch.Tensor, version: int) -> None:
        storage = tensor.untyped_storage()
        size = allocated_bytes(storage)
        unlike = size != move.bytes and not slot.dynamic
        if unlike or MARK in storage.__dict__ or self._transfers is None:
            self.counts.mismatched += 1
            return
        copy = OffloadedTensor(self._number, move._replace(bytes=size), self._run)
        self._number += 1
        value = Value(copy, move.output, tensor, self._run)
        value.version = version
        copy.stand_for(value, tensor, version)
        if move.bytes <= self.beside_bytes:
            self.beside_bytes -= move.bytes
            copy.original = sharing_version(tensor)
        self._transfers.send(copy, storage)
        setattr(storage, MARK, value)
        self._marked.append(weakref.ref(storage))
        self.counts.moved += 1

    # -- autograd -----------------------------------------------------------------------------------------------

    @module_calls.never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd stores ``tensor``: what stands for it if it was dropped, else the tensor and its version."""
        stands = placeholder_for(tensor, self._run)
        if stands is not None:
            return stands
        if self._outer is not None:
            return _Outer(self._outer[1], self._outer[0](tensor))
        if type(tensor) is torch.nn.Parameter or views_a_leaf(tensor):
            return Kept(tensor)
        # An output that is saved gets its history only after this: it looks like a leaf now.
        return PackedWrapper(tensor, self.pack) if is_wrapper_type(type(tensor)) else Kept(detached(tensor))

    @module_calls.never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        """Backward wants it back.

        Raises:
            RuntimeError: as plain autograd does, a kept tensor was changed in place (hooks switch its own check off).
            ReplayError: a dropped one cannot be made again exactly.
        """
        if self._whole_step and not self._stack and not self._step_over:
            self.end()
            self._step_over = True
        if self._transfers is not None and graph_task() != -1:
            self._transfers.asked()
        kind = type(packed)
        if kind is Recipe:
            # Mostly a burst has made it for good already.
            return packed.tensor if packed.args is None and packed.tensor is not None else unpacked(packed)
        if kind is View or kind is Value:
            return unpacked(packed)
        if kind is Kept:
            if packed.changed():
                raise _modified_in_place(packed)
            return packed.tensor
        if isinstance(packed, PackedWrapper):
            return packed.unpack(self.unpack)
        return packed.unpack() if isinstance(packed, _Outer) else packed


class _Outer:
    """A kept tensor that an outer pair of hooks (``save_on_cpu``, say) has in its care, as without the tape."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, unpack: Callable[[Any], torch.Tensor], packed: Any) -> None:
        self._unpack, self._packed = unpack, packed

    def unpack(self) -> torch.Tensor:
        return self._unpack(self._packed)


class _Region:
    """Entering puts mode, hooks and watcher in place; leaving takes all of them away, whatever happened inside."""

    __slots__ = ("before", "hooks", "node", "tape", "whole_step")

    def __init__(self, tape: Tape, node: Node, whole_step: bool) -> None:
        self.tape, self.node, self.whole_step = tape, node, whole_step

    def __enter__(self) -> Tape:
        tape = self.tape
        tape._whole_step = self.whole_step
        tape._outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        tape.begin(self.node)
        self.hooks = torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack)
        self.hooks.__enter__()
        try:
            tape.__enter__()
        except BaseException:
            self.hooks.__exit__()
            raise
        self.before = module_calls.thread_state.observer
        module_calls.thread_state.observer = tape
        return tape

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tape = self.tape
        module_calls.thread_state.observer = self.before
        try:
            tape.__exit__(kind, error, trace)
        finally:
            self.hooks.__exit__()
            while tape._stack:  # an exception may have left module calls open
                tape._frame = tape._stack.pop()
            if error is None and not tape._step_over:
                tape._close(tape._frame)
            tape.end()
            tape._outer = None


def _forget_what_it_writes(func: Any, args: tuple, kwargs: dict) -> None:
    """An unplanned write, through ``.data`` perhaps, where no version tells: the tensor is no longer its recipe's."""
    if written_arguments(func):
        for tensor in written_tensors(func, args, kwargs):
            storage = storage_of(tensor)
            if storage is not None:
                storage.__dict__.pop(MARK, None)


def _is_among(storage: torch.UntypedStorage, args: tuple) -> bool:
    """The op gave back memory it was given: an alias that the schema may not declare."""
    try:
        for argument in args:
            # One storage has one Python object, whoever asks.
            if isinstance(argument, torch.Tensor) and argument.untyped_storage() is storage:
                return True
    except (NotImplementedError, RuntimeError):  # sparse: it has none, and what is beside it is looked at with care
        return any(storage_of(a) is storage for a in args if isinstance(a, torch.Tensor))
    return False


def _modified_in_place(kept: Kept) -> RuntimeError:
    kind = f"{kept.tensor.type()} {list(kept.tensor.shape)}"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind}] is at version {kept.tensor._version}; expected version {kept.version} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
