"""Records a StepGraph from a step of training that runs without a plan, while the online tape keeps it in budget.

A rehearsal has to assume what the loss is, which backward comes and what the caller keeps alive; here all of it is
seen. The graph has to be that of the step without a tape, though the tape keeps some tensors alive for longer and frees
others early. So the record ends a storage's life where it would have ended:

- Python's reference ends when only the tape still refers to the storage, which is looked up before each op;
- autograd's ends with the last saved-tensor handle.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._C import _current_autograd_node as current_node
from torch._C import _current_graph_task_id as graph_task
from torch._C import _storage_Use_Count as use_count

from lowtide.device import values_off
from lowtide.device.block_size import in_blocks
from lowtide.device.dispatch import NOTHING
from lowtide.device.memory import counts_all
from lowtide.device.names import device_name
from lowtide.errors import UnsupportedModelError
from lowtide.estimation.roofline import estimate
from lowtide.graph.costs import Costs
from lowtide.graph.gradients import with_gone_in_step, with_these_before
from lowtide.graph.step_graph import DROP, NEW_GRADIENT, RELEASE, UNPACK, StepGraph
from lowtide.measurement.allocator import seen_on_cpu
from lowtide.recording.finished_graph import add_residents, finished_graph, resident_bytes
from lowtide.recording.gradient_sums import fold
from lowtide.recording.recorder import Recorder
from lowtide.recording.sharding import ShardingRecording
from lowtide.step import module_calls
from lowtide.step.batches import Call, describe_batch
from lowtide.step.data_assignments import DataAssignedError
from lowtide.step.deepspeed_engines import is_partitioned
from lowtide.step.function_calls import ObservedFunctionCall
from lowtide.step.operators import gradient_of, storage_of, tensors_in
from lowtide.step.optimizer_state import existing_state_bytes
from lowtide.step.other_hooks import CHECKPOINT
from lowtide.step.sharding.observer import ShardingObserver
from lowtide.step.sharding.zero3 import has_gathered
from lowtide.step.subclasses import plain_tensors, wrapped_parameters
from lowtide.step.whole_modules import calls_compiled_code
from lowtide.tape.online.online_calls import KnownCalls
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.online.online_values import Claim, SavedHandle, StoredValue
from lowtide.tape.online.room import ExpectedBytes
from lowtide.tape.values import Kept
from lowtide.tracing.model_facts import device_of
from lowtide.training.gradients_there import GradientsThere
from lowtide.training.planned_step import num_nodes
from lowtide.training.watched_times import WatchedTimes

_OWN_REFERENCES = 2  # to a storage that only the tape holds: its tensor, and the storage's Python object
# The tape's own work for each op: forward, dropped besides, replayed (benchmarks/overhead.py).
_WATCH_US, _RECORD_US, _REPLAY_US = 15.0, 15.0, 10.0


class WatchedStep(OnlineTape):
    """An online tape that records the step it watches; ``graph_and_costs`` when the step is over.

    Attributes:
        gradients: Those that the model had when the step began.
        problem_of_recording: Why the graph is not complete; "" if it is.
        found_gathered: ZeRO-3 had gathered parameters before the step, which later steps may have to do themselves.
        nodes_of_backward: So many autograd nodes the thread that runs backward had made when it made the last one of
            the step; 0: backward made none (no ``create_graph``), or runs on the thread that runs forward.
    """

    may_be_unseen = False

    def __init__(
        self,
        model: nn.Module,
        budget_bytes: float,
        expected: ExpectedBytes | None = None,
        known_calls: KnownCalls | None = None,
    ) -> None:
        super().__init__(model, budget_bytes, expected, known_calls)
        self.recorder = Recorder(device_of(model), region="step", restores_parameters=False, proves_calls=False)
        self._builder, self._storages = self.recorder.builder, self.recorder.live
        self.recorder.functions.on_error = self.stop_recording
        self._assignments = None  # the recorder looks
        self._calls_compiled_code = False
        self._counts_inputs = not counts_all(device_of(model))
        self._num_looked_at = 0  # storages of the record: which of them are inputs is known
        self._inputs_bytes = 0  # of what was there before the step, and no call of the model was given
        self._expected_inputs_bytes = self._expected.inputs_bytes or 0  # counted as live from the start
        self._ran_again: Counter[int] = Counter()  # by signature: ops that checkpointing ran again in backward
        self._op_of: dict[int, int] = {}  # by the tape's number: the builder's
        self._python_holds: dict[int, tuple[StoredValue, int]] = {}  # saved, and not yet let go by Python
        self._handed_out: dict[int, _HandedOut] = {}  # by saved tensor
        self.times = WatchedTimes(device_of(model))
        self._resident: dict[str, int] = {}
        self._other_bytes = 0  # on the device before the step; on an accelerator the optimizer's state is among it
        self.found_gathered = False
        self.nodes_of_backward = 0
        self._thread = threading.get_ident()
        self._batch = ""
        self.problem_of_recording = ""
        self._had_gradients: set[str] = set()  # names of parameters that had one when the step began
        self.gradients: GradientsThere | None = None
        self._gone: tuple[set[str], list[int]] | None = None  # of these as the first backward began, and their bytes
        self._received: set[str] = set()  # names of parameters that had a gradient when a backward had ended

    def begin_call(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """The model is called from outside; the first time, what was there before the step is noted."""
        if not self._builder.calls:
            batch = Call(args, kwargs)
            self._calls_compiled_code = any(map(calls_compiled_code, model.modules()))
            add_residents(self.recorder, model, batch)
            self._num_looked_at = len(self._builder.storages)
            self.recorder.observe_sharding(model)
            self.found_gathered = has_gathered(model)
            # Of parameters what ZeRO-3 has gathered by now, and not what it leaves gathered at the end.
            before = resident_bytes(model, batch, device_of(model), set())
            self._resident = {part: before[part] for part in ("parameters", "batch")}
            self._had_gradients = {name for name, p in model.named_parameters() if gradient_of(p) is not None}
            self._other_bytes = before["other"]
            self._batch = describe_batch(batch)
        self._builder.calls.append(module_calls.call_signature(model, args, kwargs))

    @property
    def sharding_observer(self) -> ShardingObserver:
        own, recording = super().sharding_observer, self.recorder.sharding_observer
        return own if recording is None else _WithRecord(own, recording)

    # -- what the tape sees ---------------------------------------------------------------------------------

    def enter(self, path: str) -> None:
        super().enter(path)
        self._builder.enter(path)

    def leave(self) -> None:
        super().leave()
        if self._builder.frame:
            self._builder.leave()

    def opaque(self, path: str, module: nn.Module, run: Callable[[], Any], inputs: list[torch.Tensor]) -> Any:
        what = f"{path or 'the model'} is compiled"
        if wrapped_parameters(module) or is_partitioned(module.parameters()):
            what += " and sharded, so it cannot run again as one op: what its code stores is saved"
        self.stop_recording(UnsupportedModelError(what))
        return super().opaque(path, module, run, inputs)

    def function(self, call: ObservedFunctionCall) -> Any:
        self._poll()
        return self.recorder.function(self.observed_call(call))

    def _run_op(self, func: Any, args: tuple, kwargs: dict, around: AbstractContextManager[Any] = NOTHING) -> Any:
        self._poll()
        if self._reserved_bytes and graph_task() != -1 and not torch.is_grad_enabled():  # the loss is there
            self.reserve(0)
        builder = self._builder
        if not builder.recording or builder.ops_ignored:  # of compiled code in backward some operators show
            return super()._run_op(func, args, kwargs)
        before = len(builder.ops)
        known = len(builder.signatures)
        result, failed = None, True
        ran = False

        def run(around: AbstractContextManager[Any]) -> Any:
            nonlocal result, failed, ran
            ran = True
            if self._calls_compiled_code:
                with seen_on_cpu():  # its backward may free what the op makes
                    result = super(WatchedStep, self)._run_op(func, args, kwargs, around)
            else:
                result = super(WatchedStep, self)._run_op(func, args, kwargs, around)
            failed = False
            return result

        try:
            self.recorder.record(func, args, kwargs, run)
        except DataAssignedError:  # whatever came of it would be wrong
            raise
        except Exception as error:
            if ran and failed:  # the op's own error
                raise
            self.stop_recording(error)
            return result if ran else super()._run_op(func, args, kwargs)
        if self._counts_inputs and len(builder.storages) > self._num_looked_at:
            self._count_inputs((args, kwargs))
        if len(builder.ops) > before and not self.problem:
            op = builder.ops[-1]
            if is_first := op.signature >= known:
                self.learn_workspace(func, args, op.workspace_bytes)
            if op.workspace_bytes:
                self.note_workspace(func, op.workspace_bytes)
            self.times.note(op.signature, is_first=is_first)
            self._op_of[self._number] = len(builder.ops) - 1
            if graph_task() != -1 and torch.is_grad_enabled():
                self._note_run_again(op.signature)
                if threading.get_ident() != self._thread:
                    self.nodes_of_backward = num_nodes()
        return result

    def _count_inputs(self, given: Any) -> None:
        """Tensors that no call of the model was given, targets mostly, take memory too."""
        since, self._num_looked_at = self._num_looked_at, len(self._builder.storages)
        if all([s.op is not None for s in self._builder.storages[since:]]):  # the op has made them
            return
        found = {number: t for t in tensors_in(given) if (number := self._storages.find(t) or 0) >= since}
        for number, tensor in found.items():
            storage, recorded = storage_of(tensor), self._builder.storages[number]
            if storage is None or recorded.op is not None or recorded.fixed or storage in self.live:
                continue
            self._inputs_bytes += recorded.bytes
            self.reserve(max(0, self._reserved_bytes - recorded.bytes))
            if unexpected := max(0, min(recorded.bytes, self._inputs_bytes - self._expected_inputs_bytes)):
                self.live.add(storage, unexpected)

    def _run_timed(self, func: Any, args: tuple, kwargs: dict) -> Any:
        result = self.times.run(func, args, kwargs)
        self.op_s = self.times.last_s
        return result

    def stop_recording(self, error: Exception) -> None:
        """Something that the graph cannot say: the step goes on, and no plan comes of it."""
        self._builder.recording = False
        self.problem_of_recording = self.problem_of_recording or f"{type(error).__name__}: {error}".splitlines()[0]

    @module_calls.never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        packed = super().pack(tensor)
        if type(packed) is Kept and self._builder.recording:
            saved = self._note_packed(tensor)
            return packed if saved is None else _RecordedKept(self, packed, saved)
        return packed

    def has_unseen_node(self) -> None:
        self._storages.makes_unseen = True

    @module_calls.never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is _RecordedKept:
            tensor = super().unpack(packed.kept)
            self._note_unpacked(packed.saved, tensor)
            return tensor
        tensor = super().unpack(packed)
        if type(packed) is _RecordedHandle:
            self._note_unpacked(packed.saved, tensor)
            if self._storages.find(tensor) is None:
                self._storages.add_remade(tensor, self._builder.saved[packed.saved])
            if (given := self.recorder.functions.stored.given) is not None:
                given()
        return tensor

    def handle(self, claim: Claim, tensor: torch.Tensor) -> SavedHandle:
        saved = self._note_packed(tensor)
        if saved is None:
            return super().handle(claim, tensor)
        self._python_holds[id(claim.value)] = claim.value, self._builder.saved[saved]
        return _RecordedHandle(self, claim, tensor, saved)

    def _note_packed(self, tensor: torch.Tensor) -> int | None:
        """Autograd has taken ``tensor``: the number of the saved tensor, None if it is no part of the record."""
        builder = self._builder
        number = self.recorder.number_of(tensor) if builder.recording and not self._pauses else None
        if number is None:
            return None
        if self.recorder.sharding_observer is not None:
            self.recorder.sharding_observer.check_reads((number,))
        saved = builder.add_saved(number)
        self.recorder.assignments.check(tensor)
        return saved

    def _note_unpacked(self, saved: int, tensor: torch.Tensor) -> None:
        self._drop_what_was_used()
        self._builder.add_event(UNPACK, saved)
        self._handed_out[saved] = _HandedOut(tensor)

    def note_released(self, saved: int) -> None:
        """Autograd has let a saved tensor go."""
        if self._handed_out.pop(saved, self) is not self:
            self._builder.add_event(DROP, saved)
        self._builder.add_event(RELEASE, saved)

    def _drop_what_was_used(self) -> None:
        """What an earlier autograd node was given, it has used; and this one, what it has let go of."""
        if self._handed_out:
            node = _node()
            for saved in [s for s, given in self._handed_out.items() if given.node != node or given.is_let_go]:
                del self._handed_out[saved]
                self._builder.add_event(DROP, saved)

    def _poll(self) -> None:
        """Which of the saved storages has Python let go since the last op?"""
        if graph_task() != -1:
            self._drop_what_was_used()
        for key, (value, number) in list(self._python_holds.items()):
            tensor = value.tensor
            if tensor is None:  # released, or autograd has let go: the storage's death tells
                del self._python_holds[key]
            elif use_count(tensor.untyped_storage()._cdata) <= _OWN_REFERENCES:
                self._storages.note_free(number)
                del self._python_holds[key]

    def before_backward(self, roots: Iterable[Any], *, creates: bool) -> None:
        if not (creates or self.problem or self._pauses):
            try:
                self.releaser.prove_rest()  # before gradients count as gone: a plan has to drop for what forward held
            except Exception as error:
                self.give_up(error)
        super().before_backward(roots, creates=creates)
        if self.gradients is not None and self._gone is None and not creates:
            self._gone = self.gradients.gone, list(self.gradients.gone_bytes)
        self._builder.begin_backward()

    def after_backward(
        self, roots: Iterable[Any], error: BaseException | None, *, retains: bool, creates: bool
    ) -> None:
        super().after_backward(roots, error, retains=retains, creates=creates)
        if error is None and (retains or creates):
            self._drop_what_was_used()
            self._builder.end_retained_backward()

    def note_backward(self, model: nn.Module) -> None:
        """A backward has ended: its gradients are there. If it was the last one, the step ends here.

        What backward left of its graph may keep the record open: ``backward(inputs=...)`` passes some nodes by.
        """
        self.recorder.note_end()
        if self._builder.recording:
            self._received |= self.recorder.note_gradients(model)

    # -- the end --------------------------------------------------------------------------------------------

    @property
    def proven_ops(self) -> frozenset[int]:
        """Which of the graph's forward ops made their outputs twice, with the same bits; as a plan counts them."""
        places = {op.id: place for place, op in enumerate(op for op in self._builder.ops if not op.backward)}
        proven = (self._op_of[n] for n in self.releaser.proven if n in self._op_of)
        return frozenset(places[op] for op in proven if op in places)

    def _note_run_again(self, signature: int) -> None:
        """An op has run in backward as in forward: that of checkpointing, if its code is on the stack."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_globals.get("__name__") != CHECKPOINT:
            frame = frame.f_back
        if frame is None:
            return
        self._ran_again[signature] += 1
        if not self.calls.checkpointed:  # reentrant: in its forward pass no hook shows
            function, model = getattr(frame.f_locals.get("ctx"), "run_function", None), self.model
            paths = {m: path for path, m in model.named_modules()} if model is not None else {}
            self.calls.checkpointed = paths.get(function) or "a part of the step"

    def share_run_again(self, graph: StepGraph, costs: Costs) -> float:
        """Of the step's time, what ops took that checkpointing of the model's own ran again."""
        ms = {op.signature: ms for op, ms in zip(graph.ops, costs.op_ms, strict=True)}
        again_ms = sum(count * ms.get(signature, 0.0) for signature, count in self._ran_again.items())
        return again_ms / max(sum(costs.op_ms), again_ms, 1e-9)

    def graph_and_costs(self, model: nn.Module, optimizer: Any) -> tuple[StepGraph, Costs]:
        """What was recorded, and what each op took, as far as ``times`` are known; see ``costs_of``.

        Call it when the step's backward has ended.
        """
        self._poll()
        self._builder.recording = False
        self.recorder.cut()
        self._expected.inputs_bytes = self._inputs_bytes
        graph = finished_graph(self.recorder, model, (), optimizer, self._received)
        if not self._counts_inputs:  # at the end, what the caller holds of the step is there too
            state_before = existing_state_bytes(optimizer, device_of(model)) - self.recorder.made_state_bytes
            # DDP's gradients may be parts of buckets, which are there before, whatever ``.grad`` says then.
            views_bytes = sum(
                in_blocks(grad.nbytes, graph.device)
                for name, p in model.named_parameters()
                if name in self._received - self._had_gradients - self.recorder.new_gradients.keys()
                for grad in plain_tensors(gradient_of(p))
                if storage_of(grad) is not None  # a sparse one is no part of a bucket, and has no size of its own
            )
            self._resident["other"] = max(0, self._other_bytes - state_before - views_bytes)
        targets = self.recorder.sums.targets
        new = self.recorder.new_gradients
        gone, gone_bytes = self._gone or (set(), [])
        again = {number for name in (self._had_gradients - gone) & new.keys() for number in new[name]}
        self.recorder.stop()
        batch_bytes = graph.resident["batch"] + self._resident["batch"]  # what only the loss reads, and the call's
        graph = replace(
            graph,
            resident={**graph.resident, **self._resident, "batch": batch_bytes},
            provenance={**graph.provenance, "batch": self._batch, "source": "watched step"},
        )
        graph = with_these_before(graph, {n for n in again if graph.storages[n].kind == NEW_GRADIENT})
        graph = with_gone_in_step(fold(graph, targets), gone_bytes)
        return graph, costs_of(graph, self.times)


def costs_of(graph: StepGraph, times: WatchedTimes) -> Costs:
    """What the ops of a watched step took, and what the tape's own work takes."""
    op_ms = estimate(graph, device=values_off.times_of).op_ms if values_off.times_of else times.milliseconds(graph)
    return Costs(
        op_ms=tuple(op_ms),
        dispatch_us=_WATCH_US,
        record_us=_RECORD_US,
        replay_us=_REPLAY_US,
        source="watched",
        device_name=device_name(graph.device),
    )


class _WithRecord(ShardingObserver):
    """Gathering and freeing is no part of the step that the tape sees, and part of the record."""

    def __init__(self, of_tape: ShardingObserver, recording: ShardingRecording) -> None:
        self._of_tape, self._recording = of_tape, recording
        self.closing, self.gathering_done = of_tape.closing, of_tape.gathering_done  # type: ignore[method-assign]

    @contextmanager
    def hook(self) -> Iterator[None]:
        with self._of_tape.hook(), self._recording.hook():
            yield

    def gathering(self, whole: list[torch.Tensor]) -> None:
        self._of_tape.gathering(whole)
        self._recording.gathering(whole)

    def freed(self, whole: list[torch.Tensor]) -> None:
        self._of_tape.freed(whole)
        self._recording.freed(whole)


class _RecordedHandle(SavedHandle):
    """A handle whose end is an event of the step."""

    __slots__ = ("saved", "watch")

    def __init__(self, watch: WatchedStep, claim: Any, tensor: torch.Tensor, saved: int) -> None:
        super().__init__(claim, tensor)
        self.watch, self.saved = watch, saved

    @module_calls.never_compiled
    def __del__(self) -> None:
        self.watch.note_released(self.saved)


class _RecordedKept:
    """A tensor that is held as it is, and whose end is an event of the step."""

    __slots__ = ("kept", "saved", "watch")

    def __init__(self, watch: WatchedStep, kept: Kept, saved: int) -> None:
        self.watch, self.kept, self.saved = watch, kept, saved

    @module_calls.never_compiled
    def __del__(self) -> None:
        self.watch.note_released(self.saved)


class _HandedOut:
    """A tensor that an autograd node was given, which makes a tensor of its own of it.

    That ends with the node's own code. What autograd does then (it sums a gradient over the rows that a bias was
    broadcast to) is still part of the node.
    """

    __slots__ = ("_references", "_storage", "_taken", "_tensor", "node")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.node, self._taken = _node(), False
        self._tensor = tensor  # held: else the tape might let go of it, and the count would fall for that
        self._storage = storage_of(tensor)
        self._references = 0 if self._storage is None else use_count(self._storage._cdata)

    @property
    def is_let_go(self) -> bool:
        """Whether the node had it, and has it no more."""
        if self._storage is None:
            return False
        taken = use_count(self._storage._cdata) > self._references
        self._taken |= taken
        return self._taken and not taken


def _node() -> int | None:
    """The sequence number of the autograd node that runs now."""
    node = current_node()
    return None if node is None else node._sequence_nr()
