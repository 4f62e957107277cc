"""Watches one step below autograd and writes it down as a StepGraph.

Nothing that autograd stores is held while the step is recorded: the pack hook keeps a tensor's description, and
backward gets a blank one of the same shape. So memory stays far below the plain step's, a storage's death shows
its pure Python lifetime, and the gradients, which nobody needs, are wrong. Integer and boolean tensors are held
as copies: backward uses them as indices.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.errors import UnsupportedModelError
from lowtide.graph.step_graph import DROP, FREE, PACK, RUN, UNPACK, Frame, Op, Storage
from lowtide.tracing import compiled_regions, subclasses
from lowtide.tracing.fsdp_recording import OF_THE_SHARDING, FsdpRecording
from lowtide.tracing.gradient_sums import Step, fold
from lowtide.tracing.metadata_guard import MetadataGuard
from lowtide.tracing.module_calls import never_compiled
from lowtide.tracing.operators import (
    FILLERS,
    OVERWRITERS,
    PLAIN_TYPES,
    UNINITIALISED,
    WRITES,
    allocated_bytes,
    draws,
    draws_random_numbers,
    fills_its_storage,
    left_out,
    packet_name,
    shape_depends_on_values,
    storage_of,
    tensors_in,
    why_not_replayed,
    wraps,
    written_tensors,
)
from lowtide.tracing.saved_placeholders import HeldTensor, SavedPlaceholder
from lowtide.tracing.signature_table import SignatureTable


class Recorder(TorchDispatchMode):
    """A dispatch mode, a pair of saved-tensor hooks and a module watcher in one; ``finish`` ends it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper PyTorch puts around a mode otherwise imports the compiler and costs microseconds an op.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else compiled code under the mode silently runs as eager

    def __init__(self, device: torch.device, *, region: str) -> None:
        super().__init__()
        self.device = device
        self.region = region
        self.storages: list[dict[str, Any]] = []
        self.ops: list[Op] = []
        self.saved: list[int] = []
        self.events: list[tuple[int, int]] = []
        self.frames: list[Frame] = [Frame(-1, "", 0)]
        self.signatures_seen = SignatureTable(device)
        self.calls: list[str] = []
        self.outputs: list[Any] = []
        self._metadata_guard = MetadataGuard()
        self._open: set[int] = set()  # storages made and not read yet: an in-place op may still finish them
        self._readers: dict[int, list[int]] = {}  # storage -> forward ops that read it
        self._ids: dict[int, int] = {}  # StorageImpl address -> storage id; entries go when the storage dies
        self._watch: dict[int, weakref.ref] = {}
        self._tainted: set[int] = set()  # storages whose shape depends on values
        self.written_parameters: set[int] = set()
        self._before_write: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # parameter's bytes, and as they were
        self._sums: dict[int, tuple[int, ...]] = {}  # the engine's own additions of gradients
        self._nodes: list[Any] = []  # in the order in which they ran
        self._inner_nodes: list[Any] = []  # likewise, of a graph that backward itself made
        self._made_in_forward = 0  # nodes
        self._made_under: dict[int | None, int | None] = {}  # storage -> autograd node that was running
        self._children: dict[tuple[int, str], int] = {}
        self._stack = [0]
        self._backward = False
        self._paused = False
        self._recording = True
        self.warm: set[int] = set()  # compiled modules that have run
        self.compiled: compiled_regions.CompiledOp | None = None  # its call runs
        self.gathering: FsdpRecording | None = None  # of a model that FSDP shards
        self._to_close = ExitStack()

    # -- module calls -------------------------------------------------------------------------------------------

    def enter(self, path: str) -> None:
        parent = self._stack[-1]
        ordinal = self._children.get((parent, path), 0)
        self._children[parent, path] = ordinal + 1
        self.frames.append(Frame(parent, path, ordinal))
        self._stack.append(len(self.frames) - 1)

    def leave(self) -> None:
        self._stack.pop()

    def opaque(self, path: str, module: nn.Module, run: Callable[[], Any], inputs: list[torch.Tensor]) -> Any:
        """A call of compiled code."""
        return compiled_regions.record(self, path, module, run, inputs)

    @property
    def frame(self) -> int:
        return self._stack[-1]

    @property
    def listens(self) -> bool:
        return self._recording

    @contextmanager
    def idle(self, *, but: bool = False) -> Iterator[None]:
        """What runs inside is not part of the step; with ``but``, it is again."""
        self._recording, was = but, self._recording
        try:
            yield
        finally:
            self._recording = was

    def pause(self, until: ExitStack) -> None:
        """See no operators until ``until`` is closed, or recording stops."""
        self._paused = True
        until.callback(setattr, self, "_paused", False)
        self._to_close.callback(until.close)

    # -- storages -----------------------------------------------------------------------------------------------

    def event(self, kind: int, number: int) -> None:
        if self._recording:
            self.events.append((kind, number))

    def know(
        self, tensor: torch.Tensor, kind: str, *, op: int | None = None, output: int = 0, fixed: str = ""
    ) -> int | None:
        """The id of a tensor's storage; one never seen before is of ``op``, or was there before the step."""
        storage = storage_of(tensor)
        if storage is None:
            return None
        key = storage._cdata
        if key not in self._ids:
            self._new(storage, kind, op, output, fixed)
        return self._ids[key]

    def _new(self, storage: torch.UntypedStorage, kind: str, op: int | None, output: int, fixed: str) -> int:
        number, key = len(self.storages), storage._cdata
        self.storages.append(
            {"bytes": allocated_bytes(storage), "kind": kind, "op": op, "output": output, "fixed": fixed}
        )
        self._ids[key] = number

        @never_compiled
        def died(_: Any, number: int = number, key: int = key) -> None:
            self._ids.pop(key, None)
            self._watch.pop(number, None)
            if op is not None:
                self.event(FREE, number)

        self._watch[number] = weakref.ref(storage, died)
        return number

    def fix(self, number: int, reason: str) -> None:
        if not self.storages[number]["fixed"]:
            self.storages[number]["fixed"] = reason

    # -- operators ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or not self._recording or func.namespace == "profiler" or subclasses.on_fakes():
            return func(*args, **kwargs)
        if types and any(map(wraps, types)):
            for part in subclasses.count_writes(func, args, kwargs):
                self._open.discard(self.know(part, "other"))
            return NotImplemented
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        for tensor in inputs:
            if type(tensor) not in PLAIN_TYPES and not _is_plain_parameter(tensor):
                raise UnsupportedModelError(
                    f"{func} got a {type(tensor).__module__}.{type(tensor).__qualname__} in module "
                    f"{self._path() or '(the step)'}.\n  Tensor subclasses other than DTensor (quantised weights, say) "
                    "are not taped yet.\nTrain this model without lowtide, or unwrap the tensor before the step."
                )
        reads = tuple(dict.fromkeys(n for n in (self.know(t, "other") for t in inputs) if n is not None))
        opaque = any(storage_of(t) is None for t in inputs)
        spared = [self.know(args[i], "other") for i in left_out(func, args) if isinstance(args[i], torch.Tensor)]
        reads = tuple(n for n in reads if n not in spared)
        written = tuple(
            dict.fromkeys(n for t in written_tensors(func, args, kwargs) if (n := self.know(t, "other")) is not None)
        )
        for t in inputs:
            self._look_at(t)
        for t in written_tensors(func, args, kwargs):
            self._copy_before_write(t)
        signature = self.signatures_seen.of(func, args, kwargs)
        reason = why_not_replayed(func, args, kwargs)
        if self.signatures_seen.is_new(signature):
            self._paused = True
            result = self.signatures_seen.first_run(signature, func, args, kwargs, inputs)
            self._paused = False
        else:
            result = func(*args, **kwargs)
        rng_bytes = self._rng_bytes() if draws_random_numbers(func) and draws(func, args, kwargs) else 0
        if hidden := self.signatures_seen.hidden_writes(signature):
            ids = (self.know(inputs[i], "other") for i in hidden)
            hidden_ids = {n for n in ids if n is not None} - set(written)
            if hidden_ids - set(spared):
                reason = reason or "changes an input that its schema says it only reads"
            written += tuple(sorted(hidden_ids))
        if self._backward and func is torch.ops.aten.add.Tensor:
            # A view holds its base and with it the storage: never added into (a linear weight's gradient is one).
            parts = [self.know(t, "other") for t in inputs if fills_its_storage(t) and not t._is_view()]
            # A node's own formula may add two temporaries of its own; the engine adds what an earlier node left.
            if any(self._made_under.get(n) not in (None, self._node()) for n in parts):
                self._sums[len(self.ops)] = tuple(n for n in parts if n is not None)
        elif self._backward and func in FILLERS:
            filled = self.know(args[0], "other")
            if filled is not None and self._made_under.get(filled) == self._node():
                self._sums[len(self.ops)] = (filled,)
        self._record(func, result, reads, written, reason, opaque, signature, rng_bytes)
        return result

    def _look_at(self, tensor: torch.Tensor) -> None:
        """Raises: UnsupportedModelError: what has been read was given other memory through ``.data``."""
        number = self._metadata_guard.before(tensor)
        if number is None:
            return
        self.fix(number, "was given other memory or another shape through .data")
        self._metadata_guard.made(tensor, number)
        if number in self.saved or self._readers.get(number):
            raise UnsupportedModelError(
                f"in module {self._path() or '(the step)'} a tensor of shape {list(tensor.shape)} was assigned to "
                "(x.data = ...) after an operator had read it.\n  Its backward and its replay would read the new data, "
                "which no version tells of.\nAssign to the name (x = ...), or to .data before anything reads x."
            )

    def _copy_before_write(self, tensor: torch.Tensor) -> None:
        """A parameter that the step writes (``.data``, mostly) is put back afterwards."""
        number = self.know(tensor, "other")
        if number is None or self.storages[number]["kind"] != "parameter" or number in self.written_parameters:
            return
        if self._gathers(number):
            return
        self.written_parameters.add(number)
        self._paused = True
        storage = tensor.untyped_storage()
        now = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._before_write[number] = now, now.clone()
        self._paused = False

    def _rng_bytes(self) -> int:
        state = torch.get_rng_state() if self.device.type == "cpu" else torch.cuda.get_rng_state(self.device)
        return state.numel()

    def _record(
        self, func: Any, result: Any, reads: tuple[int, ...], written: tuple[int, ...], reason: str, opaque: bool,
        signature: int, rng_bytes: int,
    ) -> None:  # fmt: skip
        number = len(self.ops)
        frame = self._stack[-1]
        backward = self._backward or torch._C._current_graph_task_id() != -1
        fixed = ""
        if not backward:
            self._open.difference_update(s for s in reads if s not in written)
            for s in reads:
                self._readers.setdefault(s, []).append(number)
            fixed = reason
            if self.gathering is not None:
                self.gathering.read(reads)
                if self.gathering.at_work:
                    fixed = OF_THE_SHARDING
            if opaque:
                fixed = fixed or "reads a tensor without one plain storage"
            if any(self.storages[s]["fixed"] and self.storages[s]["op"] is None for s in reads):
                fixed = fixed or "reads memory that is written during the step"
            if self.region == "model" and frame == 0:
                fixed = fixed or "runs outside the model"
        makes: list[int] = []
        self.events.append((RUN, number))
        for output, tensor in enumerate(tensors_in(result)):
            storage = storage_of(tensor)
            if storage is None or storage._cdata in self._ids:
                if storage is not None and not backward:  # a view, or what was written
                    self._metadata_guard.returned(tensor, self._ids[storage._cdata], written=bool(written))
                continue
            if tensor.is_inference():
                fixed = fixed or "made in inference mode"
            makes.append(self._new(storage, "backward" if backward else "activation", number, output, fixed))
            if not backward:
                self._metadata_guard.made(tensor, makes[-1])
        if backward:
            self._made_under.update(dict.fromkeys(makes, self._node()))
        if shape_depends_on_values(func) or any(s in self._tainted for s in reads):
            self._tainted.update(makes)
        if not backward and fixed in ("", UNINITIALISED):
            self._open.update(makes)
        completes_inplace = None if backward else self._finished(func, result, reads, written, reason, rng_bytes)
        if completes_inplace is None:
            for s in written:
                self.written(s)
        dynamic = bool(makes) and makes[0] in self._tainted
        self.ops.append(
            Op(number, str(func), frame, backward, reads, tuple(makes), written,
               self.signatures_seen.workspace_bytes[signature], 0 if completes_inplace is not None else rng_bytes,
               signature, dynamic,
               completes_inplace)
        )  # fmt: skip

    def _finished(
        self, func: Any, result: Any, reads: tuple[int, ...], written: tuple[int, ...], reason: str, rng_bytes: int
    ) -> int | None:
        """The op whose output this in-place op completes: then both are replayed as one, and the output may be dropped.

        Only what could have been read when the output was made may go into it, so that replays stay in order.
        """
        if reason != WRITES or len(written) != 1 or written[0] not in self._open:
            return None
        storage = self.storages[written[0]]
        maker = storage["op"]
        others = tuple(s for s in reads if s != written[0])
        if any((self.storages[s]["op"] or 0) > maker or self._overwritten(s) for s in others):
            return None
        if storage["fixed"] == UNINITIALISED:
            if packet_name(func) not in OVERWRITERS or not fills_its_storage(next(tensors_in(result))):
                return None
            storage["fixed"] = ""
        op = self.ops[maker]
        self.ops[maker] = replace(
            op, reads=tuple(dict.fromkeys((*op.reads, *others))), rng_bytes=op.rng_bytes + rng_bytes
        )
        return maker

    def _overwritten(self, storage: int) -> bool:
        return self.storages[storage]["op"] is None and bool(self.storages[storage]["fixed"])

    def written(self, storage: int) -> None:
        """Memory that changes cannot be recomputed, nor can what was computed from it before the change."""
        if self.storages[storage]["kind"] == "gradient" or self._gathers(storage):
            return
        self.fix(storage, "written during the step")
        for earlier in self._readers.pop(storage, ()):
            if earlier < len(self.ops):
                finished = self.ops[earlier].completes_inplace
                for made in self.ops[earlier if finished is None else finished].makes:
                    self.fix(made, "was computed from memory that is written later in the step")

    def _gathers(self, storage: int) -> bool:
        """FSDP puts the bits there that were there before; any other write counts."""
        gathering = self.gathering
        return gathering is not None and gathering.at_work and storage in gathering.gathered

    def _path(self) -> str:
        return self.frames[self._stack[-1]].path

    # -- autograd -----------------------------------------------------------------------------------------------

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd stores ``tensor``; outside the tape's region the plan must leave it alone."""
        if not self._recording:
            return tensor.detach()
        if wraps(type(tensor)):
            return subclasses.Packed(tensor, self.pack)
        number = self.know(tensor, "other") if self.compiled is None else self.compiled.know(tensor)
        if number is None:
            return tensor.detach()
        handle = len(self.saved)
        self.saved.append(number)
        self.event(PACK, handle)
        self._open.discard(number)
        self._look_at(tensor)
        if self.gathering is not None:
            self.gathering.read((number,))
        if self.region == "model" and self._stack[-1] == 0:
            self.fix(number, "stored outside the model")
        self._paused = True
        try:
            if self.storages[number]["op"] is None:
                return HeldTensor(self, handle, tensor.detach())
            small = tensor.untyped_storage().nbytes() <= 1024
            with torch.no_grad():
                return SavedPlaceholder(
                    self, handle, tensor, exact=small or not (tensor.is_floating_point() or tensor.is_complex())
                )
        finally:
            self._paused = False

    @never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if isinstance(packed, subclasses.Packed):
            return packed.unpack(self.unpack)
        self.event(UNPACK, packed.saved)
        if isinstance(packed, HeldTensor):
            self.event(DROP, packed.saved)
            return packed.tensor
        self._paused = True
        # A clone, because the copy lives longer than what backward holds, whose end is an event.
        handed_out = packed.blank() if packed.copy is None else packed.copy.clone()
        self._paused = False
        self._alias(handed_out, packed)
        return handed_out

    def _alias(self, tensor: torch.Tensor, ghost: SavedPlaceholder) -> None:
        """Backward ops that touch ``tensor`` touch the storage it stands for."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._ids:
            return
        self._ids[key] = self.saved[ghost.saved]
        marker = -key  # not the saved id: one handle may be unpacked again while its first tensor lives

        @never_compiled
        def died(_: Any) -> None:
            self._ids.pop(key, None)
            self._watch.pop(marker, None)
            self.event(DROP, saved)

        saved = ghost.saved
        self._watch[marker] = weakref.ref(storage, died)

    # -- the end ------------------------------------------------------------------------------------------------

    def start_backward(self) -> None:
        self._backward = True
        self._made_in_forward = torch._C._autograd._get_sequence_nr()

    def stop(self) -> None:
        """Stop recording, and put back the parameters that the step wrote: a rehearsal leaves no trace."""
        self._recording = False
        self._to_close.close()
        self._watch.clear()
        while self._before_write:
            _, (now, before) = self._before_write.popitem()
            now.copy_(before)

    def finish(self) -> Step:
        """What was recorded, once all has gone well, as it is in the plain step."""
        self.stop()
        storages = [Storage(i, **s) for i, s in enumerate(self.storages)]
        return fold(Step(storages, self.ops, self.saved, self.events), self._sums)

    def _node(self) -> int | None:
        """Which autograd node runs now, or ran last."""
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        number: int = node._sequence_nr()
        nodes = self._nodes
        if number >= self._made_in_forward:
            nodes = self._inner_nodes
        elif self._inner_nodes:  # that graph has run, and holds its inputs with their gradients
            _let_go(self._inner_nodes)
        if not nodes or nodes[-1] is not node:
            nodes.append(node)
        return number

    def forget_nodes(self) -> None:
        """Let the nodes that were asked for go, from the loss on. Call it when nothing else holds the loss."""
        _let_go(self._inner_nodes)
        _let_go(self._nodes)


def _let_go(nodes: list[Any]) -> None:
    # Python's object of a node frees the next node's, recursively: a chain of 50,000 of them overflows the stack.
    nodes.reverse()
    while nodes:
        nodes.pop()


def _is_plain_parameter(tensor: torch.Tensor) -> bool:
    """A Parameter subclass that only carries attributes dispatches like a Parameter."""
    return (
        isinstance(tensor, torch.nn.Parameter)
        and type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    )
