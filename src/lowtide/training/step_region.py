"""A part of the training loop that belongs to the step: for steps that never call the fitted model itself."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.step import module_calls
from lowtide.step.batches import Call
from lowtide.step.function_calls import ObservedFunctionCall
from lowtide.tape import attach
from lowtide.training.fitted_call import FittedCall
from lowtide.training.lifecycle import Lifecycle
from lowtide.training.planned_step import PlannedStep


@contextmanager
def step_region(
    fitted: FittedCall, lifecycle: Lifecycle, model: nn.Module, call: Call, first: PlannedStep | None
) -> Iterator[None]:
    """Surround a part of the loop; ``first`` is the plan of a fit that was given a batch."""
    if first is None:
        region = _Region(fitted, model, call)
        with fitted.in_region(region.end_part), region:
            yield
        return
    with fitted.in_region(_go_on), ExitStack() as taped:
        if not first.shapes and not first.keeps_everything:  # else the model's own calls do what is to be done
            lifecycle.begin_uncalled(first)
            taped.enter_context(attach.TapedRegion(first.tape, first.tape.program.root, whole_step=True))
        yield


def _go_on() -> None:
    """A region under one plan may hold backward, and several steps."""


class _Region:
    """Counts as a call of the model: up to a backward inside, and from the first module call after that to the next.

    So what an optimizer does between two backwards is no part of a step. Between two parts it is the thread's observer.
    """

    def __init__(self, fitted: FittedCall, model: nn.Module, call: Call) -> None:
        self._fitted, self._model, self._call = fitted, model, call
        self._num_parts = 0
        self._around: AbstractContextManager[None] | None = None  # of the part that runs
        self._entered: list[module_calls.CallObserver | None] = []  # who was told of the calls that began between parts
        self._thread = threading.current_thread()

    def __enter__(self) -> None:
        self._outer_observer = module_calls.thread_state.observer
        if self._outer_observer is None:  # else this is inside a call of the model, and part of that
            self._begin_part()

    def __exit__(self, *failure: Any) -> None:
        self._end_part(*failure)
        module_calls.thread_state.observer = self._outer_observer

    def _begin_part(self) -> None:
        args = (f"part {self._num_parts} of a region", *self._call.args)
        module_calls.thread_state.observer = None
        self._around = self._fitted.around(self._model, args, self._call.kwargs)
        self._around.__enter__()
        self._num_parts += 1

    def _end_part(self, *failure: Any) -> None:
        around, self._around = self._around, None
        if around is not None:
            around.__exit__(*(failure or (None, None, None)))
            self._fitted.note_region()

    def end_part(self) -> None:
        """Backward begins."""
        if self._around is not None and self._thread is threading.current_thread():
            self._end_part()
            module_calls.thread_state.observer = self

    # -- between two parts, as the thread's observer --------------------------------------------------------

    def enter(self, path: str) -> None:
        if torch.is_grad_enabled():
            self._begin_part()
        observer = module_calls.thread_state.observer
        told = None if observer is self else observer
        self._entered.append(told)
        if told is not None:
            told.enter(path)

    def leave(self) -> None:
        told = self._entered.pop()
        if told is not None:
            told.leave()

    def opaque(self, path: str, module: nn.Module, run: Callable[[], Any], inputs: list[torch.Tensor]) -> Any:
        return run()

    def function(self, call: ObservedFunctionCall) -> Any:
        return call.run()

    @property
    def sharding_observer(self) -> None:
        return None
