"""Recipes: one recorded op each, ready to run again.

Reference counts do the scheduling. A recipe holds what it reads, Values or kept tensors. The Value of a dropped output
holds the recipe, or is the recipe if the op has only one. After its final replay a recipe releases its arguments, and a
Value that nothing holds is freed. So every result lives from its first use to its last, and every op runs once.
Under ``retain_graph`` recipes keep their arguments, and results go when each known user has had them or backward ends.
A plan may let an op run more often; ``replay.py`` says which of its replays is final.
"""

import weakref
from collections.abc import Container, Sequence
from functools import partial
from typing import Any, Self

from torch import Tensor
from torch._C import _current_graph_task_id as graph_task
from torch._C._autograd import _get_current_graph_task_keep_graph as graph_task_keeps_graph
from torch.nn import Parameter

from lowtide.device.generators import GeneratorStates
from lowtide.errors import ReplayError
from lowtide.step import optimizer_steps
from lowtide.step.execution_state import ExecutionState, GeneratorState
from lowtide.step.operators import omitted_in_replay, storage_of, tensors_in
from lowtide.step.storage_bits import changed_unseen, has_seal
from lowtide.tape.completions import Completion, OwnOutput
from lowtide.tape.program import TapedOp
from lowtide.tape.values import (
    GatheredView,
    Kept,
    Value,
    View,
    gathered_view,
    placeholder_for,
    sharing_version,
    value_of,
)

_PLAIN_TYPES = frozenset({int, float, bool, type(None)})


class Recipe(Value):
    """One op of the forward pass, and the Value of its dropped output if it has only one. See ``Source``.

    Attributes:
        args, kwargs: With ``Value``, ``View`` and ``Kept`` in place of tensors; None after the final replay.
        outputs: The Values of several dropped outputs; None if the recipe is itself the Value of its only one.
        rng: The generator's state before the op ran; None if it draws no random numbers.
    """

    __slots__ = (
        "_completions", "args", "inputs", "kwargs", "number", "once_a_pass", "op", "outputs", "rng",
        "transient_replays",
    )  # fmt: skip

    def __init__(self, number: int, op: TapedOp, args: Sequence[Any], kwargs: dict, run: ExecutionState) -> None:
        self.number, self.op, self.run = number, op, run
        self.transient_replays, self.once_a_pass = op.transient_replays, op.once_a_pass
        self.tensor = None
        self.outputs: Sequence[weakref.ref[Value]] | None = None
        self.rng: GeneratorState | GeneratorStates | None = None
        self._completions: tuple[Completion, ...] = ()
        if op.may_skip_arguments and (skipped := omitted_in_replay(op.func, tuple(args))):
            args = [None if i in skipped else a for i, a in enumerate(args)]
        inputs: tuple[Value, ...] = ()
        # ``_stored`` written out for the most frequent kinds: this runs for each dropped op of every step.
        stored: list[Any] = []
        for argument in args:
            kind = type(argument)
            if kind is Tensor:
                placeholder = placeholder_for(argument, run)
                if placeholder is None:
                    stored.append(_kept(argument, run))
                else:
                    inputs = (*inputs, placeholder.value)
                    stored.append(placeholder)
            elif kind in _PLAIN_TYPES:
                stored.append(argument)
            elif kind is Parameter:
                # Not the parameter itself: ``p.data = new`` gives it other memory, which this op has not read. That of
                # a sharded one comes and goes.
                stored.append(_kept(argument if run.is_sharded else sharing_version(argument), run))
            else:
                found: list[Value] = []
                stored.append(_stored(argument, run, found))
                inputs += tuple(found)
        self.args: Sequence[Any] | None = stored
        self.kwargs: dict[str, Any] | None = None
        if kwargs:
            found = []
            self.kwargs = {k: _stored(v, run, found) for k, v in kwargs.items()}
            inputs += tuple(found)
        self.inputs = inputs

    @property
    def source(self) -> Self | None:
        return None if self.args is None else self

    def make_final(self) -> None:
        self.args = self.kwargs = None
        self.inputs = self._completions = ()

    def values(self) -> list[Value]:
        """The Values of its dropped outputs that still live."""
        if self.outputs is None:
            return [self]
        return [value for value in (reference() for reference in self.outputs) if value is not None]

    def extend(self, func: Any, args: tuple, kwargs: dict, value: Value, rng: GeneratorState | None) -> None:
        """Add an in-place op on ``value``, this recipe's own output."""
        inputs, run = list(self.inputs), self.run
        positional = [
            OwnOutput(a, value.output) if _same_storage(a, args[0]) else _stored(a, run, inputs) for a in args
        ]
        named = {k: _stored(v, run, inputs) for k, v in kwargs.items()}
        self.inputs = tuple(inputs)
        self._completions = (*self._completions, Completion(func, positional, named, rng))
        value.output_ref = lambda: None  # the op may have changed the tensor's metadata (``t_``)

    def holds_dropped(self, num_inputs: int) -> bool:
        """Whether so many of its inputs are dropped, as planned; else it would hold what the plan counts as freed."""
        if len(self.inputs) < num_inputs:
            return False
        return num_inputs < 2 or len(set(self.inputs)) >= num_inputs

    def inputs_later_than(self, args: tuple, kwargs: dict) -> bool:
        """Whether an argument is made by a later op: replayed in program order, it would be missing."""
        values = (value_of(t, self.run) for t in tensors_in((args, list(kwargs.values()))))
        return any(v is not None and v.source is not None and v.source.number > self.number for v in values)

    def reads(self, storage: Any) -> bool:
        """Whether it holds a kept tensor over ``storage`` for its replay."""
        completions = [(c.args, list(c.kwargs.values())) for c in self._completions]
        todo: list[Any] = [self.args, list((self.kwargs or {}).values()), completions]
        while todo:
            argument = todo.pop()
            if isinstance(argument, (list, tuple)):
                todo += argument
            elif type(argument) is Kept and storage_of(argument.tensor) is storage:
                return True
        return False

    def resolve(self, argument: Any) -> Any:
        """The argument that the op is called with, for a stored one.

        Raises:
            ReplayError: a kept tensor was changed in place since.
        """
        kind = type(argument)
        if kind is Recipe or kind is Value:
            return argument.tensor  # a burst runs inputs first
        if kind is View:
            return argument.view_of(argument.value.tensor)
        if kind is Kept:
            if argument.version >= 0 and argument.tensor._version != argument.version:
                raise _unreadable(self, argument)
            if optimizer_steps.count != self.run.steps_before and self._is_stepped(argument.tensor):
                raise _unreadable(self, argument)
            return argument.tensor
        if kind is GatheredView:
            assert self.run.gathered is not None
            if why := argument.why_unreadable(self.run.gathered):
                raise _not_gathered(self, argument, why)
            return argument.tensor()
        if kind is list:
            return [self.resolve(a) for a in argument]
        return argument

    def replay(self, *, keep: bool, wanted: Container[Value] | None = None) -> None:
        """Run the op and give its outputs to the Values that still live.

        Args:
            keep: Keep the arguments: the recipe will run again in another backward.
            wanted: A transient replay: keeps the arguments too, and only these Values get an output.
        """
        assert self.args is not None
        args = []
        for argument in self.args:  # ``resolve`` written out for the most frequent kinds
            kind = type(argument)
            if kind is Recipe:
                args.append(argument.tensor)
            elif kind in _PLAIN_TYPES:
                args.append(argument)
            else:
                args.append(self.resolve(argument))
        kwargs = {k: self.resolve(v) for k, v in self.kwargs.items()} if self.kwargs else {}
        if self.rng is None:
            result = self.op.kernel(*args, **kwargs)
        else:
            with self.rng.restored():
                result = self.op.kernel(*args, **kwargs)
        for completion in self._completions:
            completion.run(partial(nth_tensor, result), self.resolve)
        del args, kwargs
        argument = None
        final = wanted is None and not keep
        spoilt = self.run.on_difference is not None and any(value.differs for value in self.inputs)
        outputs = (self,) if self.outputs is None else self.values()
        if final:
            Recipe.make_final(self)
        for value in outputs:
            if wanted is None:
                if value is not self and value.source is None:
                    continue
            elif value not in wanted or value.source is None:
                continue
            value.tensor = result if type(result) is Tensor else nth_tensor(result, value.output)
            if value.transient is not None and (same := value.transient_tensor()) is not None:
                value.tensor = same
            if wanted is None:
                value.transient = None
                value.uses_left = value.uses_in_this_pass() if keep else -1
            if value.original is not None:
                # Another replay would be wrong again: no more of them, whatever the plan and ``retain_graph`` say.
                value.tensor, value.original, value.uses_left = value.original, None, 0
                value.make_final()
            elif value.seal is not None:
                self._check_seal(value, value.tensor, spoilt)
            if final:
                value.make_final()

    def _is_stepped(self, tensor: Tensor) -> bool:
        """An optimizer has written what this op has read, and its kernels count no version."""
        return optimizer_steps.written_since(self.run.steps_before, tensor)

    def _check_seal(self, value: Value, tensor: Tensor, spoilt: bool) -> None:
        seal = value.seal
        if isinstance(seal, Tensor):
            assert self.run.seals is not None
            # Where an optimizer steps inside backward, its end would be too late.
            at_once = self.run.steps_in_backward()
            self.run.seals.check(seal, tensor, str(self.op.func), self.op.where, at_once=at_once)
        elif seal is not None and not has_seal(tensor, seal):
            self._differs(value, spoilt)

    def _differs(self, value: Value, spoilt: bool) -> None:
        """The replay gave ``value`` other bits; ``spoilt``: it read what differed already, so the op is not to blame.

        Raises:
            ReplayError: outside of rehearsals, which throw their gradients away.
        """
        if self.run.on_difference is None:
            raise changed_unseen(str(self.op.func), self.op.where)
        value.differs = True
        if not spoilt:
            self.op.drops = ()
            self.run.on_difference(self.op)


def _unreadable(recipe: Recipe, argument: Kept) -> ReplayError:
    tensor, op = argument.tensor, recipe.op
    what = f"{op.func} in {op.where or 'the model'} cannot be replayed: a tensor of shape {list(tensor.shape)}"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return ReplayError(
            f"{what} that it read is a parameter that FSDP has freed.\n"
            "Use what a sharded module makes in that module, or through what it returns."
        )
    return ReplayError(
        f"{what} that it read was changed in place afterwards (version {tensor._version}, was {argument.version}).\n"
        "Change it before the forward pass or after backward, or fit the step that really runs."
    )


def _not_gathered(recipe: Recipe, argument: GatheredView, why: str) -> ReplayError:
    op = recipe.op
    return ReplayError(
        f"{op.func} in {op.where or 'the model'} cannot be replayed: a parameter of shape "
        f"{list(argument.parameter.ds_shape)} that it read was {why} afterwards (by ZeRO-3, or an optimizer's step).\n"
        "Run backward from what the module returned, through all of it, before the optimizer's step."
    )


def _stored(argument: Any, run: ExecutionState, inputs: list[Value]) -> Any:
    """What a recipe stores of an argument; Values of this run are appended to ``inputs``."""
    if isinstance(argument, Tensor):
        placeholder = placeholder_for(argument, run)
        if placeholder is None:
            return _kept(argument, run)
        inputs.append(placeholder.value)
        return placeholder
    return [_stored(a, run, inputs) for a in argument] if isinstance(argument, (list, tuple)) else argument


def _kept(argument: Tensor, run: ExecutionState) -> Kept | GatheredView:
    """What a recipe stores of a tensor that is not dropped."""
    return gathered_view(argument, run) or Kept(argument)


def nth_tensor(result: Any, output: int) -> Tensor:
    """The ``output``-th tensor of what an op returned, counted as the tracer does."""
    return result if isinstance(result, Tensor) else list(tensors_in(result))[output]


def _same_storage(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def count_use(value: Value) -> None:
    """A user has been given ``value``. Under ``retain_graph`` it is dropped again after the last known user."""
    if value.uses_left > 0:
        value.uses_left -= 1
        if value.uses_left == 0 and value.tensor is not None:
            value.release_to_autograd()
    elif value.source is not None and keeps_graph():
        value.uses_left -= 1  # a transient result: after the final replay of this backward one user fewer is to come


def keeps_graph() -> bool:
    """Whether a backward runs under ``retain_graph``."""
    return graph_task() != -1 and graph_task_keeps_graph()
