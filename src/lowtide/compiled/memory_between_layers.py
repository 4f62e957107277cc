"""What lives between the layers of one real step, and where it peaks there.

The step is cut at the beginning and the end of every layer's forward and backward. Between the cuts the allocator's
events are counted. What layers themselves take is known from their code, so it is not measured: the first call of a
layer compiles it, which would be counted too. Where it could be counted, the difference to the code is kept.

Gradients that the step makes are among what lives from the moment that they come. Where there were some before the
step, what comes in is added to them and goes.
"""

import gc
import math
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from lowtide.compiled import op_rates
from lowtide.compiled.choice import BACKWARD, BETWEEN, FORWARD, Moment, called
from lowtide.compiled.generated_code import VariantMemory
from lowtide.device.block_size import in_blocks
from lowtide.device.memory import PeakCounter, give_back_peak
from lowtide.device.names import is_accelerator
from lowtide.measurement.allocator import measuring
from lowtide.step import backward_entry
from lowtide.step.node_hooks import call_around
from lowtide.step.subclasses import plain_tensors

_OWNER = "lowtide: compiled layer of"  # in a node's metadata


class MemoryBetweenLayers:
    """Follows one step; ``moments`` is what ``choice`` needs.

    Args:
        device: Whose memory.

    Attributes:
        complete: Backward has reached every layer that ran.
        failed: Why nothing could be measured; "" otherwise.
        off_bytes: The most that a layer has left beyond its bytes by its code, by the allocator. Leaving less is no
            fault of the code: the last layer that holds an input of many frees it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.moments: list[Moment] = []
        self.complete, self.failed, self.off_bytes = False, "", 0
        self.handed_on: set[str] = set()  # layers all of whose outputs are inputs of others
        self._returned: dict[str, set[int]] = {}
        self.shapes: dict[str, Any] = {}  # what ran, by layer, in the order of the first calls
        self._live = self._held = 0
        self._open: Counter[str] = Counter()
        self._stored = 0  # bytes, of the layers that are open
        self._roots: list[Any] = []  # nodes where the backward that runs began
        self._begun = self._stopped = False
        # What a hook inside backward switches on or off, the engine undoes: the allocator's events are on all through,
        # and hooks only begin and end counts of them.
        self._events, self._counting = ExitStack(), ExitStack()
        self._counter: PeakCounter | None = None
        op_rates.KEPT_WORKSPACES.take(device)
        if self._events.enter_context(measuring(device)) is None:
            told = "the device's allocator keeps no statistics"
            self.failed = told if is_accelerator(device) else "a profiler was active"
        self._forget = backward_entry.observe(self)
        self._start()

    def _start(self) -> None:
        self._counter = self._counting.enter_context(measuring(self._device))

    def _cut(self) -> tuple[int, int]:
        """End what is counted now: its peak and what it left, bytes."""
        self._counting.close()
        return (0, 0) if self._counter is None else (self._counter.peak, self._counter.left)

    def _between_ends(self) -> None:
        peak, left = self._cut()
        before = self._live - self._stored - self._held
        self._held = 0
        self.moments.append(Moment(BETWEEN, "", before, peak, dict(self._open)))
        self._live += left

    def _in_blocks(self, size: int) -> int:
        return in_blocks(size, self._device.type)

    def enter_forward(self, layer: str, inputs: Iterable[torch.Tensor]) -> None:
        taken = {t.untyped_storage().data_ptr() for t in plain_tensors(*inputs)}
        self.handed_on |= {name for name, made in self._returned.items() if made <= taken}
        self._between_ends()
        self._start()

    def leave_forward(
        self, layer: str, shape: Any, memory: VariantMemory, outputs: Iterable[Any], node: Any, *, compiled_now: bool
    ) -> None:
        """``layer`` has returned ``outputs``, which come from ``node`` of autograd."""
        _, left = self._cut()
        if compiled_now:
            gc.collect()  # what compiling leaves behind holds what the layer was given
        else:
            self.off_bytes = max(self.off_bytes, left - memory.forward_end_bytes)
        self.moments.append(Moment(FORWARD, layer, self._live - self._stored, 0, dict(self._open)))
        outputs = [t for t in outputs if isinstance(t, torch.Tensor)]
        self._returned[layer] = {t.untyped_storage().data_ptr() for t in plain_tensors(*outputs)}
        self._live += memory.forward_end_bytes
        self._open[layer] += 1
        self._stored += memory.stored_bytes
        if self.shapes.setdefault(layer, shape) is not shape:
            self.failed = f"{called(layer)} was called with two sets of input shapes in one step"
        if node is None:
            self.failed = f"{called(layer)} returned nothing that has a gradient"
        else:
            self._follow(node, layer, memory, [weakref.ref(t) for t in outputs if t.dim()])
        self._start()

    def _follow(self, node: Any, layer: str, memory: VariantMemory, outputs: list[weakref.ref[torch.Tensor]]) -> None:
        zeros = 0

        def begin(gradients: Any) -> None:
            nonlocal zeros
            if self._stopped:
                return
            self._between_ends()
            zeros = sum(map(self._in_blocks, _zeros_bytes(node, gradients)))
            # The code frees what it is given, but the caller of backward still holds that.
            there = list(plain_tensors(*(g for g in gradients if g is not None)))
            held = sum(self._in_blocks(g.nbytes) for g in there) if node in self._roots else 0
            live = self._live - self._stored + zeros + held
            if layer not in self.handed_on and not any(output() is not None for output in outputs):
                live -= memory.saved_output_bytes  # nobody else holds them: they count as stored, of what saves them
            self.moments.append(Moment(BACKWARD, layer, live, 0, +self._open))
            self._begun = True
            self._start()

        def end(made: Any, gradients: Any) -> None:
            if self._stopped:
                return
            _, left = self._cut()
            # Only because there is this hook, the engine holds what came in until the hook returns.
            there = plain_tensors(*(t for t in gradients if t is not None))
            self._held = sum(self._in_blocks(t.untyped_storage().nbytes()) for t in there)
            self.off_bytes = max(self.off_bytes, left - memory.backward_end_bytes - self._held - zeros)
            self._live += memory.backward_end_bytes + self._held + zeros
            self._open[layer] -= 1
            self._open += Counter()
            self._stored -= memory.stored_bytes
            self._start()

        call_around(node, begin, end)

    def before_backward(self, roots: Iterable[Any], *, creates: bool) -> None:
        """The hooks of the layers tell the rest."""
        self._roots = [r.grad_fn if isinstance(r, torch.Tensor) else r.node for r in roots]

    def after_backward(
        self, roots: Iterable[Any], error: BaseException | None, *, retains: bool, creates: bool
    ) -> None:
        """The step has ended if no layer waits for another backward."""
        self._roots = []
        if error is not None:
            self.failed = "backward failed"
        if self._stopped or not self._begun or (self._open and error is None):
            return
        self._between_ends()
        self.complete = not self.failed
        self.stop()

    def stop(self) -> None:
        """End counting, whatever state it is in."""
        self._stopped = True
        self._forget()
        self._counting.close()
        self._events.close()
        give_back_peak(self._device)


def is_of(owner: object, node: Any) -> bool:
    """Whether an autograd node is that of a compiled layer of ``owner``: its own call has marked it."""
    return node.metadata.get(_OWNER) is owner


def _zeros_bytes(node: Any, gradients: Iterable[Any]) -> list[int]:
    """Of the zeros that autograd makes inside of ``node`` for outputs without a gradient, of each."""
    given = zip(node._input_metadata, gradients, strict=True)
    return [math.prod(spec.shape) * spec.dtype.itemsize for spec, gradient in given if gradient is None]


def mark(outputs: Iterable[Any], owner: object) -> Any:
    """Mark the autograd node of the compiled layer behind ``outputs`` as one of ``owner``; returns it, None: there is
    none. Other models have compiled layers too, and nothing of theirs is to be touched."""
    work = [t.grad_fn for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    for node in work:
        if any(name in type(node).__name__ for name in ("CompiledFunction", "_RunAgain")):
            node.metadata[_OWNER] = owner
            return node
        if len(work) < 64:
            work += [n for n, _ in node.next_functions if n is not None]
    return None
