"""Records a StepGraph from a step of training that runs without a plan, while an online tape keeps it in budget.

A rehearsal has to assume what the loss is, which backward comes and what the caller keeps alive; here all of it is
seen. The graph has to be that of the step without a tape, though the tape keeps some tensors alive for longer and frees
others early. So the record ends a storage's life where it would have ended (``stored_tensors.py``).
"""

import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._C import _current_graph_task_id as graph_task

from lowtide.device.block_size import in_blocks
from lowtide.device.dispatch import NOTHING
from lowtide.device.memory import counts_all
from lowtide.errors import UnsupportedModelError
from lowtide.graph.costs import Costs
from lowtide.graph.gradients import with_gone_in_step, with_these_before
from lowtide.graph.step_graph import NEW_GRADIENT, Op, StepGraph
from lowtide.measurement.allocator import seen_on_cpu
from lowtide.recording.finished_graph import add_residents, finished_graph, resident_bytes
from lowtide.recording.gradient_sums import fold
from lowtide.recording.listener import Held, ListenedTape, ToldSaved
from lowtide.recording.recorder import Recorder
from lowtide.recording.sharding import ShardingRecording
from lowtide.recording.stored_tensors import StoredTensors
from lowtide.recording.watched_times import WatchedTimes, costs_of
from lowtide.step import module_calls
from lowtide.step.backward_entry import num_nodes
from lowtide.step.batches import Call, describe_batch
from lowtide.step.data_assignments import DataAssignedError
from lowtide.step.deepspeed_engines import is_partitioned
from lowtide.step.function_calls import ObservedFunctionCall
from lowtide.step.gradients_there import GradientsThere
from lowtide.step.operators import gradient_of, storage_of, tensors_in
from lowtide.step.optimizer_state import existing_state_bytes
from lowtide.step.other_hooks import CHECKPOINT, frame_in
from lowtide.step.sharding.zero3 import has_gathered
from lowtide.step.subclasses import plain_tensors, wrapped_parameters
from lowtide.step.whole_modules import calls_compiled_code


class StepRecording:
    """The listener (``StepListener``) that records a step of ``model``; ``graph_and_costs`` when the step is over.

    Attributes:
        times: What its ops took.
        gradients: Those that the model had when the step began.
        problem: Why the graph is not complete; "" if it is.
        checkpointed: A module that ran again in backward, by the reentrant checkpointing; "" if none did.
        found_gathered: ZeRO-3 had gathered parameters before the step, which later steps may have to do themselves.
        nodes_of_backward: So many autograd nodes the thread that runs backward had made when it made the last one of
            the step; 0: backward made none (no ``create_graph``), or runs on the thread that runs forward.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = weakref.ref(model)
        self.recorder = Recorder(device, region="step", restores_parameters=False, proves_calls=False)
        self.recorder.functions.on_error = self.stop
        self._builder, self._storages = self.recorder.builder, self.recorder.live
        self._stored = StoredTensors(self._builder, self._storages)
        self.enter, self.released = self._builder.enter, self._stored.note_released
        self.times = WatchedTimes(device)
        self.gradients: GradientsThere | None = None
        self.problem = self.checkpointed = ""
        self.found_gathered = False
        self.nodes_of_backward = 0
        self._thread = threading.get_ident()
        self._calls_compiled_code = False
        self._counts_inputs = not counts_all(device)
        self._num_looked_at = 0  # storages of the record: which of them are inputs is known
        self._ran_again: Counter[int] = Counter()  # by signature: ops that checkpointing ran again in backward
        self._op_of: dict[int, int] = {}  # by the tape's number: the builder's
        self._resident: dict[str, int] = {}
        self._other_bytes = 0  # on the device before the step; on an accelerator the optimizer's state is among it
        self._batch = ""
        self._had_gradients: set[str] = set()  # names of parameters that had one when the step began
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
            before = resident_bytes(model, batch, self.recorder.device, set())
            self._resident = {part: before[part] for part in ("parameters", "batch")}
            self._had_gradients = {name for name, p in model.named_parameters() if gradient_of(p) is not None}
            self._other_bytes = before["other"]
            self._batch = describe_batch(batch)
        self._builder.calls.append(module_calls.call_signature(model, args, kwargs))

    def stop(self, error: Exception) -> None:
        """Something that the graph cannot say: the step goes on, and no plan comes of it."""
        self._builder.recording = False
        self.problem = self.problem or f"{type(error).__name__}: {error}".splitlines()[0]

    # -- what the tape tells ----------------------------------------------------------------------------------

    def leave(self) -> None:
        if self._builder.frame:
            self._builder.leave()

    def note_compiled(self, path: str, module: nn.Module) -> None:
        what = f"{path or 'the model'} is compiled"
        if wrapped_parameters(module) or is_partitioned(module.parameters()):
            what += " and sharded, so it cannot run again as one op: what its code stores is saved"
        self.stop(UnsupportedModelError(what))

    @property
    def sharding(self) -> ShardingRecording | None:
        return self.recorder.sharding_observer

    def function(self, call: ObservedFunctionCall) -> Any:
        self._stored.poll()
        return self.recorder.function(call)

    def run_op(self, tape: ListenedTape, func: Any, args: tuple, kwargs: dict) -> Any:
        self._stored.poll()
        builder = self._builder
        if not builder.recording or builder.ops_ignored:  # of compiled code in backward some operators show
            return tape.run_op(func, args, kwargs)
        before, known = len(builder.ops), len(builder.signatures)
        result, failed, ran = None, True, False

        def run(around: AbstractContextManager[Any]) -> Any:
            nonlocal result, failed, ran
            ran = True
            with seen_on_cpu() if self._calls_compiled_code else NOTHING:  # its backward may free what the op makes
                result = tape.run_op(func, args, kwargs, around)
            failed = False
            return result

        try:
            self.recorder.record(func, args, kwargs, run)
        except DataAssignedError:  # whatever came of it would be wrong
            raise
        except Exception as error:
            if ran and failed:  # the op's own error
                raise
            self.stop(error)
            return result if ran else tape.run_op(func, args, kwargs)
        if self._counts_inputs and len(builder.storages) > self._num_looked_at:
            self._count_inputs(tape, (args, kwargs))
        if len(builder.ops) > before and not tape.problem:
            self._note_op(tape, func, args, builder.ops[-1], is_first=builder.ops[-1].signature >= known)
        return result

    def _note_op(self, tape: ListenedTape, func: Any, args: tuple, op: Op, *, is_first: bool) -> None:
        if is_first:
            tape.learn_workspace(func, args, op.workspace_bytes)
        if op.workspace_bytes:
            tape.note_workspace(func, op.workspace_bytes)
        self.times.note(op.signature, is_first=is_first)
        self._op_of[tape.number] = len(self._builder.ops) - 1
        if graph_task() != -1 and torch.is_grad_enabled():
            self._note_run_again(op.signature)
            if threading.get_ident() != self._thread:
                self.nodes_of_backward = num_nodes()

    def _count_inputs(self, tape: ListenedTape, given: Any) -> None:
        """Tensors that no call of the model was given, targets mostly, take memory too."""
        since, self._num_looked_at = self._num_looked_at, len(self._builder.storages)
        if all([s.op is not None for s in self._builder.storages[since:]]):  # the op has made them
            return
        found = {number: t for t in tensors_in(given) if (number := self._storages.find(t) or 0) >= since}
        for number, tensor in found.items():
            storage, recorded = storage_of(tensor), self._builder.storages[number]
            if storage is not None and recorded.op is None and not recorded.fixed:
                tape.count_input(storage, recorded.bytes)

    def _note_run_again(self, signature: int) -> None:
        """An op has run in backward as in forward: that of checkpointing, if its code is on the stack."""
        if (frame := frame_in(CHECKPOINT)) is None:
            return
        self._ran_again[signature] += 1
        if not self.checkpointed:  # reentrant: in its forward pass no hook shows
            function, model = getattr(frame.f_locals.get("ctx"), "run_function", None), self._model()
            paths = {m: path for path, m in model.named_modules()} if model is not None else {}
            self.checkpointed = paths.get(function) or "a part of the step"

    def stored(self, tensor: torch.Tensor, packed: Any, value: Held | None) -> Any:
        recorder = self.recorder
        number = recorder.number_of(tensor) if self._builder.recording else None
        if number is None:
            return packed
        if recorder.sharding_observer is not None:
            recorder.sharding_observer.check_reads((number,))
        saved = self._stored.add(number, value)
        recorder.assignments.check(tensor)
        return ToldSaved(self, saved, packed, may_be_remade=value is not None)

    def given(self, saved: ToldSaved, tensor: torch.Tensor) -> None:
        self._stored.note_given(saved.number, tensor)
        if saved.may_be_remade:
            if self._storages.find(tensor) is None:
                self._storages.add_remade(tensor, self._builder.saved[saved.number])
            if (given := self.recorder.functions.stored.given) is not None:
                given()

    def note_unseen_node(self) -> None:
        self._storages.makes_unseen = True

    def before_backward(self, *, creates: bool) -> None:
        if self.gradients is not None and self._gone is None and not creates:
            self._gone = self.gradients.gone, list(self.gradients.gone_bytes)
        self._builder.begin_backward()

    def end_retained_backward(self) -> None:
        self._stored.drop_what_was_used()
        self._builder.end_retained_backward()

    def note_backward(self, model: nn.Module) -> None:
        """A backward has ended: its gradients are there. If it was the last one, the step ends here.

        What backward left of its graph may keep the record open: ``backward(inputs=...)`` passes some nodes by.
        """
        self.recorder.note_end()
        if self._builder.recording:
            self._received |= self.recorder.note_gradients(model)

    # -- the end --------------------------------------------------------------------------------------------

    def ops_of(self, numbers: Iterable[int]) -> frozenset[int]:
        """The forward ops of the tape's ``numbers``, counted as a plan counts them."""
        places = {op.id: place for place, op in enumerate(op for op in self._builder.ops if not op.backward)}
        found = (self._op_of[n] for n in numbers if n in self._op_of)
        return frozenset(places[op] for op in found if op in places)

    def share_run_again(self, graph: StepGraph, costs: Costs) -> float:
        """Of the step's time, what ops took that checkpointing of the model's own ran again."""
        ms = {op.signature: ms for op, ms in zip(graph.ops, costs.op_ms, strict=True)}
        again_ms = sum(count * ms.get(signature, 0.0) for signature, count in self._ran_again.items())
        return again_ms / max(sum(costs.op_ms), again_ms, 1e-9)

    def graph_and_costs(self, model: nn.Module, optimizer: Any) -> tuple[StepGraph, Costs]:
        """What was recorded, and what each op took, as far as ``times`` are known; see ``costs_of``.

        Call it when the step's backward has ended.
        """
        self._stored.poll()
        self._builder.recording = False
        recorder, device = self.recorder, self.recorder.device
        recorder.cut()
        graph = finished_graph(recorder, model, (), optimizer, self._received)
        if not self._counts_inputs:  # at the end, what the caller holds of the step is there too
            state_before = existing_state_bytes(optimizer, device) - recorder.made_state_bytes
            # DDP's gradients may be parts of buckets, which are there before, whatever ``.grad`` says then.
            views_bytes = sum(
                in_blocks(grad.nbytes, graph.device)
                for name, p in model.named_parameters()
                if name in self._received - self._had_gradients - recorder.new_gradients.keys()
                for grad in plain_tensors(gradient_of(p))
                if storage_of(grad) is not None  # a sparse one is no part of a bucket, and has no size of its own
            )
            self._resident["other"] = max(0, self._other_bytes - state_before - views_bytes)
        targets, new = recorder.sums.targets, recorder.new_gradients
        gone, gone_bytes = self._gone or (set(), [])
        again = {number for name in (self._had_gradients - gone) & new.keys() for number in new[name]}
        recorder.stop()
        batch_bytes = graph.resident["batch"] + self._resident["batch"]  # what only the loss reads, and the call's
        graph = replace(
            graph,
            resident={**graph.resident, **self._resident, "batch": batch_bytes},
            provenance={**graph.provenance, "batch": self._batch, "source": "watched step"},
        )
        graph = with_these_before(graph, {n for n in again if graph.storages[n].kind == NEW_GRADIENT})
        graph = with_gone_in_step(fold(graph, targets), gone_bytes)
        return graph, costs_of(graph, self.times)
