"""Recipes: one recorded op each, ready to run again.

Reference counts do the scheduling. A recipe holds what it reads, Values or kept tensors; it is the Value of its dropped
output itself, or the Values of several hold it. One that has run for good lets its arguments go; a Value that nobody
holds is gone with its memory. So every result lives from the moment it is first needed to its last consumer, and runs
once.
Under ``retain_graph`` arguments stay, and results go when each known user has had them, or when backward ends.
A plan may let a recipe run more often; ``replay.py`` says which runs are then for good.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch._C import _current_graph_task_id as graph_task
from torch._C._autograd import _get_current_graph_task_keep_graph as graph_task_keeps_graph
from torch.nn import Parameter

from lowtide.errors import ReplayError
from lowtide.tape.execution_state import ExecutionState, GeneratorState
from lowtide.tape.program import Slot
from lowtide.tape.values import Kept, Shape, Value, View, placeholder_for, value_of
from lowtide.tracing.operators import omitted_in_replay, tensors_in
from lowtide.tracing.restore import same_bits

_AS_THEY_ARE = frozenset({int, float, bool, type(None)})


class Recipe(Value):
    """One op of the forward pass; if one output of it is dropped, as of most, also the Value of that.

    Attributes:
        number: Position in the forward pass; bursts run in this order.
        slot: The planned op: operator, module path.
        args, kwargs: With ``Value``, ``View`` and ``Kept`` in place of tensors; None once done for good.
        inputs: The Values among them.
        outputs: The Values of several dropped outputs; None if the recipe stands for its only one.
        passing_runs: How many runs are to come before the one for good.
    """

    __slots__ = (
        "_finish", "args", "inputs", "kwargs", "number", "on_audit", "outputs", "passing_runs", "rng", "slot",
    )  # fmt: skip

    def __init__(self, number: int, slot: Slot, args: Sequence[Any], kwargs: dict, run: ExecutionState) -> None:
        self.number, self.slot, self.run = number, slot, run
        self.passing_runs = slot.passing_runs
        self.tensor = None
        self.outputs: Sequence[weakref.ref[Value]] | None = None
        self.rng: GeneratorState | None = None
        self.on_audit: Callable[[bool], None] | None = None
        self._finish: tuple[_Finish, ...] = ()
        if slot.spares and (spared := omitted_in_replay(slot.func, tuple(args))):
            args = [None if i in spared else a for i, a in enumerate(args)]
        inputs: tuple[Value, ...] = ()
        # In line for what nearly every argument is: this runs for each dropped op of every step.
        noted: list[Any] = []
        for argument in args:
            kind = type(argument)
            if kind is Tensor:
                stands = placeholder_for(argument, run)
                if stands is None:
                    noted.append(Kept(argument))
                else:
                    inputs = (*inputs, stands.value)
                    noted.append(stands)
            elif kind in _AS_THEY_ARE:
                noted.append(argument)
            elif kind is Parameter:
                noted.append(Kept(argument))
            else:
                found: list[Value] = []
                noted.append(_note(argument, run, found))
                inputs += tuple(found)
        self.args: Sequence[Any] | None = noted
        self.kwargs: dict[str, Any] | None = None
        if kwargs:
            found = []
            self.kwargs = {k: _note(v, run, found) for k, v in kwargs.items()}
            inputs += tuple(found)
        self.inputs = inputs

    @property
    def recipe(self) -> Recipe | None:
        return None if self.args is None else self

    def is_made_for_good(self) -> None:
        self.args = self.kwargs = None
        self.inputs = self._finish = ()

    @property
    def func(self) -> Any:
        return self.slot.func

    def values(self) -> list[Value]:
        """The Values of its dropped outputs that somebody still holds."""
        if self.outputs is None:
            return [self]
        return [value for value in (reference() for reference in self.outputs) if value is not None]

    def extend(
        self, func: Any, args: tuple, kwargs: dict, value: Value, run: ExecutionState, rng: GeneratorState | None
    ) -> None:
        """Add an in-place op on ``value``, this recipe's own output."""
        inputs = list(self.inputs)
        taken = [_Own(value, a) if _same_storage(a, args[0]) else _note(a, run, inputs) for a in args]
        named = {k: _note(v, run, inputs) for k, v in kwargs.items()}
        self.inputs = tuple(inputs)
        self._finish = (*self._finish, _Finish(func, taken, named, rng))
        value.own = _nothing  # it may look at its storage in another way now (``t_``)

    def inputs_later_than(self, args: tuple, kwargs: dict, run: ExecutionState) -> bool:
        """Some argument is made by a later op than this one: replayed in program order, it would not be there."""
        values = (value_of(t, run) for t in tensors_in((args, list(kwargs.values()))))
        return any(v is not None and v.recipe is not None and v.recipe.number > self.number for v in values)

    def give(self, argument: Any) -> Any:
        """What the op gets for a noted argument.

        Raises:
            ReplayError: a kept tensor was changed in place since.
        """
        kind = type(argument)
        if kind is Recipe or kind is Value:
            return argument.tensor  # a burst runs inputs first
        if kind is View:
            return argument.of(argument.value.tensor)
        if kind is Kept:
            if argument.version >= 0 and argument.tensor._version != argument.version:
                raise _unreadable(self, argument)
            return argument.tensor
        if kind is list:
            return [self.give(a) for a in argument]
        return argument

    def replay(self, *, keep: bool, wanted: Container[Value] | None = None) -> None:
        """Run the op; hand its outputs to the Values that still live.

        Args:
            keep: Let nothing go: it will run again in another backward.
            wanted: A passing run: nothing goes either, and only these Values get an output.
        """
        assert self.args is not None
        args = []
        for argument in self.args:  # in line, what ``give`` would do for nearly every argument
            kind = type(argument)
            if kind is Recipe:
                args.append(argument.tensor)
            elif kind in _AS_THEY_ARE:
                args.append(argument)
            else:
                args.append(self.give(argument))
        kwargs = {k: self.give(v) for k, v in self.kwargs.items()} if self.kwargs else {}
        if self.rng is None:
            result = self.slot.kernel(*args, **kwargs)
        else:
            with self.rng.restored():
                result = self.slot.kernel(*args, **kwargs)
        for finish in self._finish:
            finish.run(result, self.give)
        del args, kwargs
        argument = None
        for_good = wanted is None and not keep
        made = (self,) if self.outputs is None else self.values()
        if for_good:
            Recipe.is_made_for_good(self)
        elif wanted is None:
            for value in self.inputs:
                had_by_one(value)
        for value in made:
            if wanted is None:
                if value is not self and value.recipe is None:
                    continue
            elif value not in wanted or value.recipe is None:
                continue
            value.tensor = result if type(result) is Tensor else nth_tensor(result, value.output)
            if value.lent is not None and (lent := value.found_again()) is not None:
                value.tensor = lent
            if wanted is None:
                value.lent = None
                value.left = value.users + min(value.left, 0) if keep else -1
            if value.original is not None:
                self._audit(value)
            if for_good:
                value.is_made_for_good()

    def _audit(self, value: Value) -> None:
        """Compare the replay with the tensor that was kept beside it; where they differ, the kept one is right."""
        original, value.original = value.original, None
        assert original is not None and value.tensor is not None
        equal = same_bits(value.tensor, original)
        if not equal:
            # Another run would be wrong again: this one is made for good, whatever the plan and ``retain_graph`` say.
            value.tensor, value.left = original, 0
            value.is_made_for_good()
        if self.on_audit is not None:
            self.on_audit(equal)


def _unreadable(recipe: Recipe, argument: Kept) -> ReplayError:
    tensor, slot = argument.tensor, recipe.slot
    what = f"{slot.func} in {slot.where or 'the model'} cannot be replayed: a tensor of shape {list(tensor.shape)}"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return ReplayError(
            f"{what} that it read is a parameter that FSDP has freed.\n"
            "Use what a sharded module makes in that module, or through what it returns."
        )
    return ReplayError(
        f"{what} that it read was changed in place afterwards (version {tensor._version}, was {argument.version}).\n"
        "Change it before the forward pass or after backward, or fit the step that really runs."
    )


class _Finish:
    """An in-place op that completes a recipe's own output."""

    __slots__ = ("args", "func", "kwargs", "rng")

    def __init__(self, func: Any, args: list[Any], kwargs: dict[str, Any], rng: GeneratorState | None) -> None:
        self.func, self.args, self.kwargs, self.rng = func, args, kwargs, rng

    def run(self, result: Any, give: Callable[[Any], Any]) -> None:
        args = [a.of(nth_tensor(result, a.output)) if type(a) is _Own else give(a) for a in self.args]
        with nullcontext() if self.rng is None else self.rng.restored():
            self.func(*args, **{k: give(v) for k, v in self.kwargs.items()})


class _Own(Shape):
    """A recipe's own output as the argument of a later step of the recipe. Holds no Value: that would be a cycle."""

    __slots__ = ("output",)

    def __init__(self, value: Value, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.output = value.output


def _note(argument: Any, run: ExecutionState, inputs: list[Value]) -> Any:
    """What a recipe notes of an argument; Values of this run also go into ``inputs``."""
    if isinstance(argument, Tensor):
        stands = placeholder_for(argument, run)
        if stands is None:
            return Kept(argument)
        inputs.append(stands.value)
        return stands
    if isinstance(argument, (list, tuple)):
        return [_note(a, run, inputs) for a in argument]
    return argument


def nth_tensor(result: Any, output: int) -> Tensor:
    """The ``output``-th tensor of what an op returned, as the tracer counts them."""
    return result if isinstance(result, Tensor) else list(tensors_in(result))[output]


def _same_storage(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _nothing() -> None:
    return None


def had_by_one(value: Value) -> None:
    """One known user has had a Value that ``retain_graph`` keeps: after the last, drop it again."""
    if value.left > 0:
        value.left -= 1
        if value.left == 0:
            value.tensor = None
    elif value.recipe is not None and keeps_graph():
        value.left -= 1  # in passing: when it is made for the rest of this backward, one user fewer is to come


def keeps_graph() -> bool:
    """A backward runs, and there may be another after it."""
    return graph_task() != -1 and graph_task_keeps_graph()
