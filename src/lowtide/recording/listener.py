"""What an online tape tells whoever listens to its step, and what the listener may ask of the tape.

A tape without a listener asks once for an op, and once for a tensor that autograd stores, whether there is one.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from lowtide.device.dispatch import NOTHING
from lowtide.recording.watched_times import WatchedTimes
from lowtide.step import module_calls
from lowtide.step.function_calls import ObservedFunctionCall
from lowtide.step.sharding.observer import ShardingObserver


class Held(Protocol):
    """What the tape knows of a storage; ``tensor``: over its memory, None where the tape holds it no more."""

    tensor: torch.Tensor | None


class ListenedTape(Protocol):
    """The tape as its listener sees it while an op runs; the methods are explained there."""

    problem: str

    @property
    def number(self) -> int: ...
    def run_op(self, func: Any, args: tuple, kwargs: dict, around: AbstractContextManager[Any] = NOTHING) -> Any: ...
    def learn_workspace(self, func: Any, args: tuple, size: int) -> None: ...
    def note_workspace(self, func: Any, size: int) -> None: ...
    def count_input(self, storage: torch.UntypedStorage, size: int) -> None: ...


class StepListener(Protocol):
    """Listens to one step. Its own errors end what it does, never the step, but for ``DataAssignedError``.

    Methods:
        run_op: An op has come, and runs here, by the tape's ``run_op``. ``times``: every kernel runs through them.
        function: A call of an autograd Function has come, and runs here, by ``call.run``.
        enter, leave: A module call begins; the innermost one ends.
        note_compiled: Compiled code is about to run, and nobody sees inside.
        sharding: Who is told, beside the tape, of what gathers parameters.
        stored: Autograd stores ``tensor``. Returns what it is to hold: ``packed``, or a ``ToldSaved`` of that. The tape
            may let go of the memory of ``value``, if there is one.
        given, released: A backward has asked for a ``ToldSaved``, and gets ``tensor``; autograd has let go of it.
        note_unseen_node: What the autograd node that runs now makes, nobody sees being made.
        before_backward: A backward begins. ``end_retained_backward``: One has ended, and its graph stays.
    """

    times: WatchedTimes

    def run_op(self, tape: ListenedTape, func: Any, args: tuple, kwargs: dict) -> Any: ...
    def function(self, call: ObservedFunctionCall) -> Any: ...
    def enter(self, path: str) -> None: ...
    def leave(self) -> None: ...
    def note_compiled(self, path: str, module: nn.Module) -> None: ...
    @property
    def sharding(self) -> ShardingObserver | None: ...
    def stored(self, tensor: torch.Tensor, packed: Any, value: Held | None) -> Any: ...
    def given(self, saved: "ToldSaved", tensor: torch.Tensor) -> None: ...
    def released(self, number: int) -> None: ...
    def note_unseen_node(self) -> None: ...
    def before_backward(self, *, creates: bool) -> None: ...
    def end_retained_backward(self) -> None: ...


class ToldSaved:
    """What autograd holds for a tensor that a listener follows; ``packed``: what the tape makes the tensor from.

    Attributes:
        number: The listener's.
        may_be_remade: What autograd is given may be other memory than it stored.
    """

    __slots__ = ("listener", "may_be_remade", "number", "packed")

    def __init__(self, listener: StepListener, number: int, packed: Any, *, may_be_remade: bool) -> None:
        self.listener, self.number, self.packed, self.may_be_remade = listener, number, packed, may_be_remade

    @module_calls.never_compiled
    def __del__(self) -> None:
        self.listener.released(self.number)
