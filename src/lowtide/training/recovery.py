"""A step that runs out of memory is undone and runs again, within less.

A step moves gradients (``accumulated_gradients.py``), buffers and random generators; these are put back. If it changed
anything that cannot be put back, such as a parameter, it does not run again, and a note on the error says why.
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from lowtide.device.memory import release_cached_memory
from lowtide.device.out_of_memory import is_out_of_memory, let_go_of_frames
from lowtide.errors import LowtideError
from lowtide.step import backward_entry
from lowtide.step.autograd_leaves import leaves_of
from lowtide.step.batches import batch_tensors
from lowtide.step.data_parallel import ddp_wrapper_of
from lowtide.step.deepspeed_engines import is_partitioned
from lowtide.step.restore import TrainingState
from lowtide.training.accumulated_gradients import GradientsBefore
from lowtide.training.budget import StepBudget
from lowtide.training.lifecycle import Lifecycle
from lowtide.units import format_bytes

Result = TypeVar("Result")


class Recovery:
    """Runs steps of one watched model."""

    def __init__(self, model: nn.Module, budget: StepBudget, lifecycle: Lifecycle) -> None:
        self._model, self._budget, self._lifecycle = weakref.ref(model), budget, lifecycle
        # Whether to look up what a backward adds to before it runs (2 ms for 3600 nodes). Where a step runs one, and
        # only for the model, the graph of the one that fails is enough. The first step tells; None: not yet.
        self._looks_ahead: bool | None = None

    def run(self, step: Callable[[Any, Any], Result], batch: Any) -> Result:
        """See ``Fit.run``."""
        lifecycle = self._lifecycle
        inner = self._model()
        if inner is None:
            raise LowtideError("the fitted model is gone: nothing holds it any more.")
        model = ddp_wrapper_of(inner) or inner
        if lifecycle.recovers:  # a step in a step
            return step(model, batch)
        lifecycle.recovers = True
        before = _StepBefore(inner, batch, lifecycle.spare_bytes, looks_ahead=self._looks_ahead is not False)
        try:
            return self._run(lambda: step(model, batch), before)
        finally:
            self._looks_ahead = bool(self._looks_ahead) or before.needs_look_ahead
            before.close()
            lifecycle.recovers = False

    def _run(self, step: Callable[[], Result], before: "_StepBefore") -> Result:
        first: BaseException | None = None
        held = ""
        tried: list[int] = []  # budgets
        limit = self._budget.limit_bytes
        while True:
            try:
                return step()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
                # Here, as the frames of the error still hold what the step has made.
                held = held or self._lifecycle.what_held()
                lowered = self._lifecycle.lower_budget(error, attempt=len(tried))
            self._lifecycle.abandon_step()
            why_not = before.restore()
            first = first or failure
            if why_not or lowered is None:
                break
            tried.append(lowered)
            let_go_of_frames(failure)
            del failure
            gc.collect()
            release_cached_memory()
        if tried:  # less did not help: later steps, which may need less memory, are not to pay for it
            self._lifecycle.memory.cap(self._budget.a_tenth_below(limit))
        first.add_note(_note(tried, why_not))
        if held:
            first.add_note(held)
        try:
            raise first.with_traceback(failure.__traceback__)
        finally:
            del first, failure  # the traceback holds this frame


class _StepBefore:
    """What a step may move, as it was; an observer of its backwards."""

    def __init__(self, model: nn.Module, batch: Any, spare_bytes: Callable[[], int], *, looks_ahead: bool) -> None:
        self._state = TrainingState(model)
        tensors = batch_tensors(batch)
        self._parameters = list(model.parameters())
        self._gradients = GradientsBefore(spare_bytes)
        self._gradients.add([*self._parameters, *(t for t in tensors if t.is_leaf and t.requires_grad)])
        # Too large to copy, and seldom written: whether they were, versions tell.
        unwritten = [*((p, "a parameter") for p in self._parameters), *((t, "the batch") for t in tensors)]
        self._versions = [(t, t._version, what) for t, what in unwritten if not t.is_inference()]
        self._looks_ahead = looks_ahead
        self._num_backwards = self._num_unseen = 0
        self._trains_others = self._adds_unseen = False
        self._stop = backward_entry.observe(self)

    @property
    def needs_look_ahead(self) -> bool:
        """The backward that fails would not tell all that was added to."""
        return self._num_backwards > 1 or self._trains_others or self._adds_unseen

    def before_backward(self, roots: Iterable[Any], **_: bool) -> None:
        self._num_backwards += 1
        if self._looks_ahead:
            self._look_at(roots)

    def after_backward(self, roots: Iterable[Any], error: BaseException | None, **_: bool) -> None:
        if self._looks_ahead:
            return
        if error is None:
            self._num_unseen += 1
        else:
            self._adds_unseen |= self._look_at(roots)

    def _look_at(self, roots: Iterable[Any]) -> bool:
        """Whether a backward from ``roots`` adds to more than the model and the batch."""
        others = [leaf for leaf in leaves_of(roots) if leaf not in self._gradients]
        self._gradients.add(others)
        self._trains_others |= bool(others)
        return bool(others)

    def restore(self) -> str:
        """Put it back; else why the step cannot run again."""
        self._adds_unseen |= self._num_unseen > 0
        why_not = self._what_is_lost()
        if not why_not:
            self._state.restore()
            self._num_backwards = 0
        return why_not

    def _what_is_lost(self) -> str:
        if _has_other_ranks():
            return "the other ranks would wait for this one"
        if is_partitioned(self._parameters):
            return "ZeRO-3 has parameters of the failed step gathered"
        for tensor, version, what in self._versions:
            if tensor._version != version:
                return f"it wrote {what}"
        if self._adds_unseen:
            return "what its backward added to is not known (it will be in the next step)"
        return self._gradients.restore()

    def close(self) -> None:
        self._stop()
        self._gradients.close()


def _has_other_ranks() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _note(tried: list[int], why_not: str) -> str:
    if why_not:
        return f"lowtide did not run the step again: {why_not}."
    if not tried:
        return "lowtide did not run the step again: it ran within the least budget that there is."
    within = ", then ".join(map(format_bytes, tried))
    return (
        f"lowtide ran the step again within {within}, and memory ran out each time. Gradients, buffers and random "
        "generators are as before the step. Use a smaller batch."
    )
