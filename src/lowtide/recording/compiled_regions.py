"""A call of compiled code, recorded as one op: what it makes is saved, what it allocates besides is its workspace.

No dispatch mode sees operators in there: their kernels are called directly, on memory that no dispatcher allocated.
What can be seen is what the call reads and returns, what autograd stores of it, and the allocator's peak, forward and
backward.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.graph.step_graph import COMPILED_CODE, RUN, UNPACK, Op
from lowtide.measurement.allocator import measuring
from lowtide.recording.graph_builder import GraphBuilder
from lowtide.recording.live_storages import LiveStorages
from lowtide.step.autograd_leaves import nodes_since
from lowtide.step.batches import batch_tensors
from lowtide.step.node_hooks import call_around
from lowtide.step.operators import fingerprint
from lowtide.step.restore import preserve_training_state

MADE_HERE = "made by compiled code"


class CompiledRegions:
    """Records the calls of compiled code in one step."""

    def __init__(self, builder: GraphBuilder, live: LiveStorages, device: torch.device) -> None:
        self._builder, self._live, self._device = builder, live, device
        self.current: CompiledOp | None = None  # of the call that runs now
        self._compiled: set[int] = set()  # ids of modules that have run
        self.open_in_backward = ExitStack()  # what a failed backward leaves open

    def record(self, path: str, module: nn.Module, run: Callable[[], Any], inputs: list[torch.Tensor]) -> Any:
        """Run a call of compiled code as one op of the step; a new module once more before, to compile it."""
        self._builder.enter(path)
        try:
            with _disable_current_modes():
                if id(module) not in self._compiled:
                    self._compiled.add(id(module))
                    with self._builder.paused():
                        _warm_up(module, run)
                first_node = torch._C._autograd._get_sequence_nr()
                result = self._forward(module, run, inputs)
        finally:
            self._builder.leave()
        for node in nodes_since(first_node, batch_tensors(result)):
            self._record_backward(node)
        return result

    def _forward(self, module: nn.Module, run: Callable[[], Any], inputs: list[torch.Tensor]) -> Any:
        builder = self._builder
        state = [*inputs, *module.parameters(), *module.buffers()]
        known = {n: t for t in state if (n := self._live.id_of(t)) is not None}
        before = {n: fingerprint(t) for n, t in known.items() if builder.storages[n].kind != "parameter"}
        op = self.current = CompiledOp(builder, self._live, self._device, tuple(known))
        try:
            with op.running:
                result = run()
                op.finish(batch_tensors(result))
        finally:
            self.current = None
        for number, was in before.items():
            if fingerprint(known[number]) != was:
                builder.mark_written(number)
        return result

    def _record_backward(self, node: Any) -> None:
        """When backward comes to ``node``, record it as one op."""
        op: CompiledOp | None = None

        def begin(gradients: Any) -> None:
            nonlocal op
            op = CompiledOp(self._builder, self._live, self._device, ())
            op.running.enter_context(self._builder.ignoring_ops())
            self.open_in_backward.callback(op.running.close)

        def end(made: Any, gradients: Any) -> None:
            assert op is not None
            op.finish([t for t in made if t is not None])

        call_around(node, begin, end)


def _warm_up(module: nn.Module, run: Callable[[], Any]) -> None:
    """Compile, forward and backward, and have buffers and generators as they were."""
    with preserve_training_state(module, None, gradients="none"):
        outputs = [t for t in batch_tensors(run()) if t.requires_grad]
        wanted = [p for p in module.parameters() if p.requires_grad]
        if outputs and wanted:
            torch.autograd.grad([t.float().sum() for t in outputs], wanted, allow_unused=True)


class CompiledOp:
    """The op of one call, forward or backward: storages that appear while it runs are made by it.

    Its event comes first: what the call lets autograd store is stored afterwards. In a backward of compiled code, which
    frees what it was given as it goes, it comes after that. ``finish`` ends the call; close ``running`` where it fails.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        live: LiveStorages,
        device: torch.device,
        reads: tuple[int, ...],
        name: str = COMPILED_CODE,
    ) -> None:
        self._builder, self._live, self._name = builder, live, name
        self._first_event = len(builder.events)
        self._number = builder.begin_op()
        self.makes: list[int] = []  # storages
        self._backward = torch._C._current_graph_task_id() != -1
        builder.ops.append(Op(self._number, name, builder.frame, self._backward, reads, ()))
        self._start_s = time.perf_counter()
        self.running = ExitStack()
        self._device, self._measuring = device, self.running.enter_context(ExitStack())
        self._counter = self._measuring.enter_context(measuring(device))
        self._counts_copies = True

    def id_of(self, tensor: torch.Tensor) -> int | None:
        """As ``LiveStorages.id_of``, for what autograd stores of the call and what it returns."""
        kind, known = "backward" if self._backward else "activation", len(self._builder.storages)
        number = self._live.id_of(tensor, kind, op=self._number, output=len(self.makes), fixed=MADE_HERE)
        if number == known:
            self.makes.append(number)
        return number

    def measure_anew(self) -> None:
        """What was allocated so far is what the call was given, copies or remade: none of it is its workspace."""
        self._measuring.close()
        self._counter, self._counts_copies = self._measuring.enter_context(measuring(self._device)), False

    def finish(self, made: list[torch.Tensor], *, outside_s: float = 0.0) -> None:
        """End the call and complete the op: its time, what it made, and what the allocator had beyond that.

        Args:
            outside_s: Seconds since it began that are not its own.
        """
        ms = (time.perf_counter() - self._start_s - outside_s) * 1e3
        self.running.close()
        builder = self._builder
        for tensor in made:
            self.id_of(tensor)

        def total(storages: Any) -> int:
            return sum(builder.storages[s].bytes for s in storages)

        # While a step is traced autograd gets copies of what the step made, which the allocator has counted here.
        since = builder.events[self._first_event :]
        unpacked = {builder.saved[n] for kind, n in since if kind == UNPACK}
        copies = [s for s in unpacked if builder.storages[s].op is not None] if self._counts_copies else []
        peak = 0 if self._counter is None else self._counter.peak - total(copies)
        if not self._counts_copies and sum(kind == RUN for kind, _ in since) == 1:
            # It frees what it was given as it goes, so that what it makes may have its place. What the step holds
            # elsewhere is let go afterwards: a plan may hold it for this alone.
            let_go = builder.let_go_since(self._first_event)
            first = [e for e in since if e[0] == UNPACK or builder.let_go_by(e) in let_go]
            builder.events[self._first_event :] = [*first, *(e for e in since if e not in first)]
            peak += total(let_go)
        builder.ops[self._number] = replace(
            builder.ops[self._number],
            makes=tuple(self.makes),
            workspace_bytes=max(peak - total(self.makes), 0),
            signature=builder.add_signature({"op": self._name}, recorded_ms=ms),
        )
