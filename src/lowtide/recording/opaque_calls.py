"""Calls of autograd Functions whose kernels no dispatcher sees, recorded as one op each.

The ops that such a call does show (``aten.empty``, mostly) are recorded as any others. When it returns, what it
returned and is about to store is compared with what the recorded ops made. If all of it is equal, those ops stay. If
not, they are joined into one op, which stands for the whole call and may run again. The first call of a kind is
compared bit by bit, and in a rehearsal it runs once more at once: outputs, what it stores, inputs, buffers and
generators are compared. A call that must not run again is saved, and a reason names it.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import _AutoDispatchBelowADInplaceOrView as below_autograd
from torch._C._autograd import _get_sequence_nr as get_sequence_nr
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.device.generators import GeneratorStates, state_bytes
from lowtide.device.names import is_accelerator
from lowtide.device.streams import synchronize
from lowtide.graph.function_ops import IN_CONTEXT
from lowtide.graph.step_graph import Op
from lowtide.measurement.op_inputs import COLLECTIVES, describe
from lowtide.measurement.op_times import SWEPT_BYTES
from lowtide.recording.compiled_regions import CompiledOp
from lowtide.recording.graph_builder import GraphBuilder, Mark
from lowtide.recording.live_storages import LiveStorages
from lowtide.step.autograd_leaves import nodes_since
from lowtide.step.function_calls import (
    TRANSPARENT,
    UNSETTLED,
    CallOfFunction,
    ObservedFunctionCall,
    ReportingFunctions,
    run_again,
    stored_and_returned,
    why_not_same,
)
from lowtide.step.kinds_of_calls import KnownKinds
from lowtide.step.node_hooks import call_around
from lowtide.step.operators import UNINITIALISED, fingerprint, is_wrapper_type, storage_of, tensors_in

_RUNS, _RUNS_S = 3, 0.2  # so often is a call run again for its time, within so many seconds
# Verdicts, beside other reasons why what a call makes must be saved, and "".
_WRITES_UNSEEN = "writes in place without saying so"


@dataclass
class StoresOfCalls:
    """What saved-tensor hooks and such calls tell each other.

    Attributes:
        stores: What autograd stores now is of a call that is one op.
        unpacked: What the node that runs now in backward was given, if it is one op: the tensor, its storage's id, and
            its fingerprint then.
        inspecting_s: Seconds that went into giving it those, and into inspecting them.
        given: Called when it was given one, where it is compiled code.
    """

    stores: bool = False
    unpacked: list[tuple[torch.Tensor, int, tuple[int, ...]]] | None = None
    inspecting_s: float = 0.0
    given: Callable[[], None] | None = None

    @contextmanager
    def inspecting(self) -> Iterator[None]:
        """What runs inside is no part of the node's time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.inspecting_s += time.perf_counter() - start


@dataclass
class _Running:
    """A call that runs now.

    Attributes:
        inputs: Fingerprints of its arguments before; only where it is looked at bit by bit.
        seen: Fingerprints of what its ops made or wrote when they had, by storage; likewise.
        written: What they wrote.
    """

    call: ObservedFunctionCall
    how: CallOfFunction
    mark: Mark
    generators: GeneratorStates  # before it
    start_s: float
    inputs: list[tuple[int, ...]] | None = None
    seen: dict[int, tuple[int, ...]] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    name: str = ""  # of its op, once it is known to be one
    context: Any = None


class CallsAsOne:
    """Records the calls of Functions in one step.

    Attributes:
        proves: A call of a new kind runs again at once.
        buffers: Those of the model, which no call may change unseen.
        found_unsettled: A call ran other code than later ones will.
        on_error: Called with an error in what is done when a call has returned; None: it is raised.
    """

    def __init__(
        self, builder: GraphBuilder, live: LiveStorages, device: torch.device, *, proves: bool,
        open_in_backward: ExitStack, why_fixed: Callable[[tuple[int, ...], str], str],
        note_made: Callable[[list[int]], None],
    ) -> None:  # fmt: skip
        """``open_in_backward``: what a failed backward leaves open; ``note_made``: gets what an op of backward made."""
        self._builder, self._live, self._device, self.proves = builder, live, device, proves
        self._open_in_backward, self._why_fixed, self._note_made = open_in_backward, why_fixed, note_made
        self.stored = StoresOfCalls()
        self.buffers: list[torch.Tensor] = []
        self.found_unsettled = False
        self.on_error: Callable[[Exception], None] | None = None
        self._watched = ReportingFunctions()
        self._running: _Running | None = None
        self._known = KnownKinds(many_places=True)  # why results must be saved, "" or TRANSPARENT
        self._signatures: dict[str, int] = {}

    def record(self, call: ObservedFunctionCall) -> Any:
        """Run ``call``, as one op if its own ops do not say what it does."""
        builder = self._builder
        wrapped = any(is_wrapper_type(type(t)) for t in tensors_in(call.args))
        if self._running is not None or not builder.recording or builder.ops_ignored or wrapped:
            return call.run()
        how = call.how
        with _disable_current_modes():
            generators = GeneratorStates(call.tensors)
        running = self._running = _Running(call, how, builder.mark(), generators, time.perf_counter())
        verdict = self._known.verdict(how.kind(call.args))
        if verdict is None or verdict == _WRITES_UNSEEN:
            running.inputs = self._fingerprints(tensors_in(call.args))
        first_node = get_sequence_nr()
        try:
            result = call.run_watched(self._watched, self._returned)
        finally:
            self._running, self.stored.stores = None, False
        nodes = {t.grad_fn for t in tensors_in(result)} - {None}
        if running.name and call.is_unseen:
            for node in nodes_since(first_node, list(tensors_in(result))):
                self._record_backward(node, running.name, looks=False)
        elif running.name and running.context in nodes and self.proves:
            self._record_backward(running.context, running.name, looks=True)
        return result

    def note_op(self, made: Any, written: list[torch.Tensor]) -> None:
        """An op has run."""
        running = self._running
        if running is None or running.inputs is None or running.name:
            return
        for tensor in written:
            if (number := self._live.find(tensor)) is not None:
                running.written.add(number)
                running.seen[number] = self._fingerprints([tensor])[0]
        for tensor in tensors_in(made):
            number = self._live.find(tensor)
            # Not of a view, which may be taken when a kernel has written.
            if number is not None and number >= running.mark.storages and number not in running.seen:
                running.seen[number] = self._fingerprints([tensor])[0]

    def _fingerprints(self, tensors: Any) -> list[tuple[int, ...]]:
        with self._builder.ignoring_ops(), _disable_current_modes():
            return [fingerprint(t) for t in tensors]

    # -- when a call has returned -----------------------------------------------------------------------------------

    def _returned(self, ctx: Any, output: Any) -> None:
        """Before autograd stores anything."""
        try:
            self._inspect(ctx, output)
        except Exception as error:
            if self.on_error is None:
                raise
            self.on_error(error)

    def _inspect(self, ctx: Any, output: Any) -> None:
        running, builder = self._running, self._builder
        assert running is not None
        results = stored_and_returned(ctx, output)
        kind = running.how.kind(running.call.args)
        took_s = running.call.seconds
        ms = 1e3 * (time.perf_counter() - running.start_s if took_s is None else took_s)
        verdict = self._known.verdict(kind)
        changed = set() if running.inputs is None else self._mark_changed(running)
        if verdict is None and not running.call.is_settled:
            verdict, self.found_unsettled = UNSETTLED, True
        if verdict is None:
            verdict, ms = self._judge(running, ctx, results, changed, ms)
            self._known.learn(kind, verdict)
        if verdict == TRANSPARENT or len(builder.saved) > running.mark.saved or self._is_needed_by_op(running.mark):
            return
        self._join(running, ctx, results, verdict, ms)

    def _mark_changed(self, running: _Running) -> set[int]:
        """The storages of inputs that have changed though no op wrote them; they count as written."""
        assert running.inputs is not None
        inputs = list(tensors_in(running.call.args))
        changed = set()
        for tensor, before, now in zip(inputs, running.inputs, self._fingerprints(inputs), strict=True):
            number = self._live.find(tensor)
            if now != before and number is not None and running.seen.get(number) != now:
                self._builder.mark_written(number)
                changed.add(number)
        return changed

    def _is_needed_by_op(self, mark: Mark) -> bool:
        """Whether the record needs one of the call's ops by itself: it communicates, or completes an earlier output."""
        return any(
            op.name.partition(".")[0] in COLLECTIVES
            or (op.completes_inplace is not None and op.completes_inplace < mark.ops)
            for op in self._builder.ops[mark.ops :]
        )

    def _judge(
        self, running: _Running, ctx: Any, results: list[torch.Tensor], changed: set[int], ms: float
    ) -> tuple[str, float]:
        """Why what the call made must be saved, or ``TRANSPARENT``; and the milliseconds that it takes."""
        args, mark = running.call.args, running.mark
        if not running.how.stays_whole and not changed and all(self._is_explained(t, running) for t in results):
            return TRANSPARENT, ms
        if changed - {self._live.find(t) for t in ctx.dirty_tensors or ()}:
            return _WRITES_UNSEEN, ms
        inputs = list(tensors_in(args))
        if ctx.dirty_tensors or any(self._live.find(t) in running.written for t in inputs):
            return "writes its inputs in place", ms
        read = {s for op in self._builder.ops[mark.ops :] for s in op.reads if s < mark.storages}
        given = {self._live.find(t) for t in inputs}
        if any(self._builder.storages[s].op is not None for s in read - given):
            return "reads what it is not given", ms
        if reason := running.how.why_not_again():
            return reason, ms
        if not self.proves:
            return running.call.why_kept or "", ms
        tensors, generators = running.call.tensors, running.generators
        with self._builder.ignoring_ops():
            reason = why_not_same(running.how, tensors, results, generators, self.buffers)
            return reason, ms if reason else self._milliseconds(running.how, tensors, generators)

    def _is_explained(self, tensor: torch.Tensor, running: _Running) -> bool:
        """Whether the ops that were seen made what is in ``tensor``."""
        number = self._live.find(tensor)
        if number is None:
            return False
        if number < running.mark.storages:
            return True
        storage = self._builder.storages[number]
        if storage.op is None or storage.fixed == UNINITIALISED:
            return False
        return running.seen.get(number) == self._fingerprints([tensor])[0]

    def _milliseconds(self, call: CallOfFunction, tensors: list[torch.Tensor], generators: GeneratorStates) -> float:
        """What the call takes, which has proven to give the same each time."""
        times: list[float] = []
        # As ``measure`` does, or short kernels read up to twice too cheap.
        swept = torch.zeros(0 if is_accelerator(self._device) else SWEPT_BYTES, dtype=torch.uint8)
        with _disable_current_modes(), below_autograd(), torch._C._DisableAutocast(), generators.restored():
            while not times or (len(times) < _RUNS and sum(times) < _RUNS_S):
                swept.add_(1)
                synchronize(self._device)
                start = time.perf_counter()
                run_again(call, *tensors)
                synchronize(self._device)
                times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e3

    def _join(self, running: _Running, ctx: Any, results: list[torch.Tensor], why_not: str, ms: float) -> None:
        builder, live = self._builder, self._live
        mark, args, number = running.mark, running.call.args, running.mark.ops
        running.name, running.context, self.stored.stores = running.call.name, ctx, True
        ops = builder.ops[mark.ops :]
        restored = {live.find(t) for t in running.how.restores}
        given = [n for t in running.call.tensors if (n := live.find(t)) is not None]
        reads = tuple(dict.fromkeys([*given, *(s for op in ops for s in op.reads if s < mark.storages)]))
        reads = tuple(s for s in reads if s not in restored)
        writes = tuple(dict.fromkeys(s for op in ops for s in op.writes if s < mark.storages and s not in restored))
        dirty = [n for t in tensors_in(ctx.dirty_tensors or ()) if (n := live.find(t)) is not None]
        reason = self._why_fixed(reads, why_not)
        if any(storage_of(t) is None for t in (*results, *tensors_in(args))):
            reason = reason or "reads or makes a tensor without one plain storage"
        # NumPy's memory has been seen by no op.
        outputs = [live.id_of(t, "activation", op=number, fixed=reason) for t in results]
        for storage in {s for s in outputs if s is not None and s >= mark.storages}:
            if builder.storages[storage].op is None:
                live.adopt(storage)
            builder.unfix(storage)
            builder.fix(storage, reason)
        for storage in {n for t in tensors_in(vars(ctx)) if (n := live.find(t)) is not None}:
            if storage >= mark.storages:
                builder.unfix(storage)
                builder.fix(storage, IN_CONTEXT)
        with _disable_current_modes():
            draws = running.generators.have_moved()
        op = Op(
            number,
            running.name,
            builder.frame,
            False,
            reads,
            (),
            tuple(dict.fromkeys((*writes, *dirty))),
            rng_bytes=state_bytes(self._device) if draws else 0,
            signature=self._signature_of(running, ms),
            dynamic=any(o.dynamic for o in ops),
            workspace_bytes=running.call.peak_bytes,
        )
        builder.join_ops(mark, op, [-1 if s is None else s for s in outputs])
        for storage in dirty:
            builder.mark_written(storage)

    def _signature_of(self, running: _Running, ms: float) -> int:
        signature = describe(running.name, running.call.args, {"requires_grad": running.how.requires_grad})
        text = json.dumps(signature, sort_keys=True)
        number = self._signatures.get(text)
        if number is None:
            number = self._signatures[text] = self._builder.add_signature(signature, recorded_ms=ms)
        elif not self.proves:  # the first call was looked at, which takes time
            self._builder.recorded_ms[number] = min(self._builder.recorded_ms[number], ms)
        return number

    # -- backward -----------------------------------------------------------------------------------------------------

    def _record_backward(self, node: Any, name: str, *, looks: bool) -> None:
        """When backward comes to ``node``, record it as one op: its kernels are not seen either.

        Args:
            looks: Whether its arguments are checked for writes. Compiled code writes only what nothing else reads, and
                frees its arguments early, which the check would prevent.
        """
        builder, live, device, note_made = self._builder, self._live, self._device, self._note_made
        stored, open_in_backward = self.stored, self._open_in_backward
        op: CompiledOp | None = None

        def begin(gradients: Any) -> None:
            nonlocal op
            op = None
            if torch.is_grad_enabled():  # part of a loss: what can be differentiated again shows its operators
                return
            stored.unpacked, stored.inspecting_s = [] if looks else None, 0.0
            read = (n for t in tensors_in(gradients) if (n := live.find(t)) is not None)
            op = CompiledOp(builder, live, device, tuple(dict.fromkeys(read)), f"{name}.backward")
            op.running.enter_context(builder.ignoring_ops())
            open_in_backward.callback(op.running.close)
            stored.given = None if looks else op.measure_anew

        def end(made: Any, gradients: Any) -> None:
            if op is None:
                return
            unpacked, stored.unpacked, stored.given = stored.unpacked or [], None, None
            with stored.inspecting():
                for tensor, number, before in unpacked:
                    if fingerprint(tensor) == before:
                        continue
                    if tensor.numel() and not tensor.untyped_storage().nbytes():  # freed: when, no event tells
                        builder.mark_written(number)
                    else:
                        builder.mark_written_in_backward(number)
                unpacked.clear()
            op.finish(list(tensors_in(made)), outside_s=stored.inspecting_s)
            note_made(op.makes)

        call_around(node, begin, end)
