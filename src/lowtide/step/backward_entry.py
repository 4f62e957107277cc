"""Sees every backward start and end, from outside the engine.

What a hook, an unpack or a queued callback pushes or pops inside backward is undone by the engine, which restores the
thread's state for every node; and no hook reports that a backward has failed. ``Tensor.backward``,
``autograd.backward`` and ``autograd.grad`` all go through one Python function, which is wrapped while a step is
observed. All three pass the roots first, then their gradients, whether the graph is retained, and whether one is
created.

A backward that creates a graph is part of a loss: what it makes is differentiated again, as what a forward makes is.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.autograd as autograd
import torch.autograd.graph as autograd_graph
from torch._C import _current_graph_task_id as graph_task
from torch._C._autograd import _get_sequence_nr

from lowtide.step import ctc_lengths
from lowtide.step.subclasses import fake_mode_is_on

_DETACH = torch.ops.aten.detach.default
_NAME = "_engine_run_backward"  # in both modules


class BackwardObserver(Protocol):
    """Gets each outermost backward and its roots, on the thread that runs it. Must not raise.

    ``retains``: its graph was retained, for another backward; ``creates``: it made a graph of its own, for a loss.
    """

    def before_backward(self, roots: Iterable[Any], *, creates: bool) -> None: ...
    def after_backward(
        self, roots: Iterable[Any], error: BaseException | None, *, retains: bool, creates: bool
    ) -> None: ...


@runtime_checkable
class SpeaksToLoop(Protocol):
    """An observer that may have something to raise into the training loop."""

    def backward_returns(self) -> None:
        """A backward that did not fail is over, and every observer knows."""


_observers: list[weakref.ref[BackwardObserver]] = []  # weak: this list must not keep a fitted model alive
_around: list[AbstractContextManager[Any]] = []  # see ``runs_within``
_entry: Any = None  # what was there before
_first_entry: Any = None  # the first time
_num_creating = 0  # backwards that create a graph and run now: of all threads, since a device has its own


def num_nodes() -> int:
    """How many nodes autograd has made on this thread."""
    return int(_get_sequence_nr())


def in_last_backward() -> bool:
    """Whether a backward runs whose results nobody differentiates. Known while somebody observes."""
    return graph_task() != -1 and not _num_creating


def is_autograds_own(func: Any) -> bool:
    """Whether ``func`` runs since autograd hands out what it saved, in a backward that creates a graph.

    How often it does so depends on who looks on: it is no op of the step.
    """
    return func is _DETACH and _num_creating > 0 and graph_task() != -1


@contextmanager
def observed_by(observer: BackwardObserver) -> Iterator[None]:
    """Inside, ``observer`` is told."""
    undo = observe(observer)
    try:
        yield
    finally:
        undo()


def observe(observer: BackwardObserver, *, first: bool = False) -> Callable[[], None]:
    """Tell ``observer`` of every backward, ``first`` or after others; returns the undo, which may be called twice."""
    _put_in_place()
    reference = weakref.ref(observer, _forget)
    _observers.insert(0 if first else len(_observers), reference)
    return partial(_forget, reference)


@contextmanager
def runs_within(around: AbstractContextManager[Any]) -> Iterator[None]:
    """Inside, every backward runs ``with around``.

    Whoever put a wrapper of their own there would not know whether ours, which comes and goes, lies below it.
    """
    _put_in_place()
    _around.append(around)
    try:
        yield
    finally:
        _around.remove(around)
        _take_away()


def _put_in_place() -> None:
    global _entry, _first_entry
    if not _observers and not _around:
        _entry = vars(autograd_graph)[_NAME]
        _first_entry = _first_entry or _entry
        _set(_run_backward)
        ctc_lengths.put_in_place()


def _forget(reference: weakref.ref[BackwardObserver]) -> None:
    if _observers and reference in _observers:  # None when the interpreter ends
        _observers.remove(reference)
        _take_away()


def _take_away() -> None:
    if not _observers and not _around:
        ctc_lengths.take_away()
        # Whoever has wrapped the wrapper meanwhile keeps it; without observers it only passes on.
        if vars(autograd_graph)[_NAME] is _run_backward:
            _set(_entry)


def _set(entry: Any) -> None:
    for module in (autograd, autograd_graph):
        setattr(module, _NAME, entry)


class _Here(threading.local):
    runs = False  # the entry that we have found, on this thread


_here = _Here()


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    # Inside another one; or the compiler's, which derives a backward from fake tensors in the middle of a forward pass.
    if graph_task() != -1 or fake_mode_is_on():
        return _run_within(args, kwargs)
    if _here.runs:  # who has wrapped us, and was left in place, passes on to us, and we have passed on to them
        return _first_entry(*args, **kwargs)
    retains, creates = bool(args[2]), bool(args[3])
    global _num_creating
    observers = [observer for reference in _observers if (observer := reference()) is not None]
    for observer in observers:
        observer.before_backward(args[0], creates=creates)
    failure: BaseException | None = None
    _num_creating += creates
    try:
        result = _run_within(args, kwargs)
    except BaseException as error:
        failure = error
        raise
    finally:
        _num_creating -= creates
        for observer in observers:
            observer.after_backward(args[0], failure, retains=retains, creates=creates)
        failure = None  # its traceback holds this frame: a cycle, and the step's memory in it
    for observer in observers:
        if isinstance(observer, SpeaksToLoop):
            observer.backward_returns()
    return result


def _run_within(args: tuple, kwargs: dict) -> Any:
    before, _here.runs = _here.runs, True
    try:
        if not _around:
            return _entry(*args, **kwargs)
        with ExitStack() as stack:
            for around in _around:
                stack.enter_context(around)
            return _entry(*args, **kwargs)
    finally:
        _here.runs = before
