"""A call of compiled code, recorded as one op: what it makes is saved, what it takes inside is its workspace.

Nobody sees operators in there: their kernels are called directly, on memory that no dispatcher allocated. What can be
seen is what the call reads and returns, what autograd stores of it, and the allocator's peak, forward and backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.graph.step_graph import RUN, UNPACK, Op
from lowtide.measurement.allocator import measuring
from lowtide.tracing.batches import batch_tensors
from lowtide.tracing.module_calls import never_compiled
from lowtide.tracing.operators import fingerprint

if TYPE_CHECKING:
    from lowtide.tracing.recorder import Recorder

NAME = "lowtide.compiled.region"
MADE_HERE = "made by compiled code"


def record(recorder: Recorder, path: str, module: nn.Module, run: Callable[[], Any], inputs: list[torch.Tensor]) -> Any:
    """Run a call of compiled code as one op of the step; once more before, where it is new."""
    recorder.enter(path)
    try:
        with _disable_current_modes():
            if id(module) not in recorder.warm:
                recorder.warm.add(id(module))
                with recorder.idle():
                    _warm_up(module, run)
            first_node = _next_node()
            result = _forward(recorder, module, run, inputs)
    finally:
        recorder.leave()
    for node in _nodes_since(first_node, batch_tensors(result)):
        _watch(recorder, node)
    return result


def _forward(recorder: Recorder, module: nn.Module, run: Callable[[], Any], inputs: list[torch.Tensor]) -> Any:
    state = [*inputs, *module.parameters(), *module.buffers()]
    known = {n: t for t in state if (n := recorder.know(t, "other")) is not None}
    before = {n: fingerprint(t) for n, t in known.items() if recorder.storages[n]["kind"] != "parameter"}
    op = recorder.compiled = CompiledOp(recorder, tuple(known))
    try:
        start = time.perf_counter()
        with measuring(recorder.device) as counter:
            result = run()
        ms = (time.perf_counter() - start) * 1e3
        for tensor in batch_tensors(result):
            op.know(tensor)
    finally:
        recorder.compiled = None
    op.finish(ms, counter)
    for number, was in before.items():
        if fingerprint(known[number]) != was:
            recorder.written(number)
    return result


def _warm_up(module: nn.Module, run: Callable[[], Any]) -> None:
    """Compile, forward and backward, and have buffers and the generator as they were."""
    cuda = any(p.is_cuda for p in module.parameters())
    state = torch.get_rng_state(), torch.cuda.get_rng_state_all() if cuda else None
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    outputs = [t for t in batch_tensors(run()) if t.requires_grad]
    wanted = [p for p in module.parameters() if p.requires_grad]
    if outputs and wanted:
        torch.autograd.grad([t.float().sum() for t in outputs], wanted, allow_unused=True)
    del outputs
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state_all(state[1])


def _next_node() -> int:
    """The sequence number that the next autograd node gets, at least."""
    with torch.enable_grad():
        node = torch.empty(0, requires_grad=True).clone().grad_fn
    assert node is not None
    return node._sequence_nr()


def _nodes_since(first: int, outputs: list[torch.Tensor]) -> Iterator[Any]:
    """The nodes behind ``outputs`` that were made since then; not those that accumulate gradients."""
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node in seen or node._sequence_nr() < first or not node.next_functions:
            continue
        seen.add(node)
        yield node
        stack += [n for n, _ in node.next_functions if n is not None]


def _watch(recorder: Recorder, node: Any) -> None:
    """When backward comes to ``node``, record it as one op."""
    op: CompiledOp | None = None
    measured = ExitStack()

    @never_compiled
    def begin(gradients: Any) -> None:
        nonlocal op
        op = CompiledOp(recorder, ())
        op.start_s = time.perf_counter()
        op.counter = measured.enter_context(measuring(recorder.device))
        recorder.pause(measured)

    @never_compiled
    def end(made: Any, gradients: Any) -> None:
        assert op is not None
        ms = (time.perf_counter() - op.start_s) * 1e3
        measured.close()
        for tensor in made:
            if tensor is not None:
                op.know(tensor)
        op.finish(ms, op.counter)

    node.register_prehook(begin)
    node.register_hook(end)


class CompiledOp:
    """The op of one call, forward or backward: what appears while it runs is made by it.

    Its event comes first: what the call lets autograd store is stored afterwards.
    """

    def __init__(self, recorder: Recorder, reads: tuple[int, ...]) -> None:
        self._recorder, self.backward = recorder, torch._C._current_graph_task_id() != -1
        self._number, self._frame, self._from = len(recorder.ops), recorder.frame, len(recorder.events)
        self.makes: list[int] = []
        self.counter: Any = None
        self.start_s = 0.0
        recorder.event(RUN, self._number)
        recorder.ops.append(Op(self._number, NAME, self._frame, self.backward, reads, ()))

    def know(self, tensor: torch.Tensor) -> int | None:
        """As ``Recorder.know``, for what autograd stores of the call and what it returns."""
        recorder, kind = self._recorder, "backward" if self.backward else "activation"
        known = len(recorder.storages)
        number = recorder.know(tensor, kind, op=self._number, output=len(self.makes), fixed=MADE_HERE)
        if number == known:
            self.makes.append(number)
        return number

    def finish(self, ms: float, counter: Any) -> None:
        """Write the op down: what it made, and what the allocator had beyond that."""
        recorder = self._recorder
        size = [s["bytes"] for s in recorder.storages]
        made = sum(size[s] for s in self.makes)
        # While a step is rehearsed autograd gets blank tensors back, which the allocator has counted here.
        handed = {recorder.saved[n] for kind, n in recorder.events[self._from :] if kind == UNPACK}
        peak = 0 if counter is None else counter.peak - sum(size[s] for s in handed)
        signature = recorder.signatures_seen.add({"op": NAME, "ms": ms})
        recorder.ops[self._number] = replace(
            recorder.ops[self._number],
            makes=tuple(self.makes),
            workspace_bytes=max(peak - made, 0),
            signature=signature,
        )
