"""One op of an online step while it runs."""

from typing import Any

import torch

from lowtide.step.execution_state import GeneratorState
from lowtide.step.operators import written_tensors
from lowtide.tape.online.foreign_ops import ForeignOp
from lowtide.tape.online.online_values import Recipe
from lowtide.tape.online.room import Key, Need


class RunningOp:
    """What is known of it before it runs.

    Attributes:
        number: Of the step's ops. ``layer``: the layer's call in which it runs.
        backward: It runs in the step's backward.
        inputs: The tensors among its arguments. ``read_bytes``: of those that are no keywords.
        written: Those that it writes.
        room_bytes: What it is expected to take, where its shapes were asked for (``key``); else 0.
        foreign: What is looked at where it is no operator of PyTorch's own.
        recipe: What makes its outputs again. None: it writes, or reads what cannot be named (``unreadable`` says why).
        rng: The generator's state before it, if it draws random numbers.
    """

    __slots__ = (
        "args", "backward", "foreign", "func", "inputs", "key", "kwargs", "layer", "need", "number", "read_bytes",
        "recipe", "rng", "room_bytes", "unreadable", "written",
    )  # fmt: skip

    def __init__(
        self, func: Any, args: tuple, kwargs: dict, need: Need, inputs: list[torch.Tensor], *, in_backward: bool
    ) -> None:
        self.func, self.args, self.kwargs, self.need = func, args, kwargs, need
        self.inputs, self.backward = inputs, in_backward
        self.number = self.layer = 0
        self.written = written_tensors(func, args, kwargs) if need.facts.writes else []
        self.key: Key | None = None
        self.read_bytes = self.room_bytes = 0
        self.recipe: Recipe | None = None
        self.foreign: ForeignOp | None = None
        self.rng: GeneratorState | None = None
        self.unreadable = ""
