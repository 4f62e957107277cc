"""Recipes: how to make a dropped tensor again.

    Value    one dropped storage. Autograd's handles and other recipes' arguments hold it; nothing else does.
    Recipe   one recorded op: operator, arguments, generator state. Its dropped outputs' Values hold it.

Reference counts do the scheduling. A recipe that has run for good lets its arguments go; a Value that nobody holds is
gone with its memory. So every result lives from the moment it is first needed to its last consumer, and runs once.
Under ``retain_graph`` arguments stay, and results go when each known user has had them, or when backward ends.
A plan may let a recipe run more often; ``bursts.py`` says which runs are then for good.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._C import DispatchKey

from lowtide.errors import ReplayError
from lowtide.tape.ambient import Ambient, GeneratorState
from lowtide.tracing.operators import left_out, tensors_in
from lowtide.tracing.state import same_bits

_PLAIN = frozenset({int, float, bool, type(None)})  # arguments that are what they are
MARK = "_lowtide_value"  # on the storage's Python object, so it dies with the storage and no address is reused


class Value:
    """One dropped storage, at one version.

    Attributes:
        recipe: Makes it; None once it has been made for good.
        tensor: The output as replayed; None while it is dropped.
        users: Handles and recipes that were given it.
        left: Under ``retain_graph``: users still to come in this backward; below 0, those that had it in passing.
        lent: The storage of a passing result that autograd has.
        original: The dropped tensor itself, kept beside while it is audited.
    """

    __slots__ = ("__weakref__", "left", "lent", "original", "output", "recipe", "run", "tensor", "users", "version")

    def __init__(self, recipe: Recipe, output: int, version: int, run: object) -> None:
        self.recipe: Recipe | None = recipe
        self.output = output
        self.version = version
        self.run = run
        self.tensor: torch.Tensor | None = None
        self.original: torch.Tensor | None = None
        self.users = 0
        self.left = 0
        self.lent: weakref.ref[torch.UntypedStorage] | None = None

    def found_again(self) -> torch.Tensor | None:
        """The lent tensor, flat, if autograd still has it: any view can be made of it."""
        storage = None if self.lent is None else self.lent()
        return None if storage is None else torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class View:
    """A tensor as seen through its Value: ``as_strided`` metadata, dtype and the conjugate and negative bits."""

    __slots__ = ("conj", "dtype", "neg", "offset", "size", "stride", "value")

    def __init__(self, value: Value, tensor: torch.Tensor) -> None:
        value.users += 1
        self.value = value
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = dtype = tensor.dtype
        self.conj = dtype.is_complex and tensor.is_conj()
        self.neg = tensor.is_neg()

    def of(self, base: torch.Tensor) -> torch.Tensor:
        if base.dtype is self.dtype:
            if base.size() == self.size and base.stride() == self.stride and base.storage_offset() == self.offset:
                tensor = base
            else:
                tensor = base.as_strided(self.size, self.stride, self.offset)
        else:
            tensor = torch.empty(0, dtype=self.dtype, device=base.device)
            tensor.set_(base.untyped_storage(), self.offset, self.size, self.stride)
        if self.conj:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.neg else tensor


class _Own(View):
    """A recipe's own output as the argument of a later step of the recipe. Holds no Value: that would be a cycle."""

    __slots__ = ("output",)

    def __init__(self, value: Value, tensor: torch.Tensor) -> None:
        super().__init__(value, tensor)
        value.users -= 1
        self.output = value.output
        del self.value


class Kept:
    """A recipe's argument that the plan keeps: the tensor, and the version it had when the op read it."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Inference tensors count no writes; autograd never stores them, recipes may read them.
        self.version = -1 if tensor.is_inference() else tensor._version
        # Never hold what has a grad_fn: graph -> handle -> recipe -> tensor -> graph would never be freed.
        self.tensor = tensor if tensor.grad_fn is None else sharing_version(tensor)

    def changed(self) -> bool:
        return self.version >= 0 and self.tensor._version != self.version


def sharing_version(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without history, counting in-place writes together with it.

    Inside ``__torch_dispatch__`` a plain ``detach`` gets a version counter of its own, and a guard on it never fires.
    """
    torch._C._dispatch_tls_set_dispatch_key_excluded(DispatchKey.ADInplaceOrView, False)
    try:
        return tensor.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(DispatchKey.ADInplaceOrView, True)


class Recipe:
    """One op of the forward pass, ready to run again.

    Attributes:
        number: Position in the forward pass; bursts run in this order.
        where: Module path, for messages.
        args, kwargs: With ``View`` and ``Kept`` in place of tensors; None once done for good.
        inputs: The Values among them.
        passing_runs: How many runs are to come before the one for good.
    """

    __slots__ = (
        "__weakref__",
        "_finish",
        "ambient",
        "args",
        "func",
        "inputs",
        "kwargs",
        "number",
        "on_audit",
        "outputs",
        "passing_runs",
        "rng",
        "where",
    )

    def __init__(self, number: int, func: Any, where: str, ambient: Ambient, passing_runs: int) -> None:
        self.number, self.func, self.where, self.ambient = number, func, where, ambient
        self.passing_runs = passing_runs
        self.inputs: Sequence[Value] = ()
        self.outputs: Sequence[tuple[int, weakref.ref[Value]]] = ()
        self.rng: GeneratorState | None = None
        self.on_audit: Callable[[bool], None] | None = None
        self.args: Any = None
        self.kwargs: Any = None
        self._finish: tuple[tuple[Any, list, dict, GeneratorState | None], ...] = ()

    def extend(
        self, func: Any, args: tuple, kwargs: dict, value: Value, run: object, rng: GeneratorState | None
    ) -> None:
        """Add an in-place op on ``value``, this recipe's own output."""
        inputs = list(self.inputs)
        taken = [_Own(value, a) if _same_storage(a, args[0]) else _take(a, run, inputs) for a in args]
        named = {k: _take(v, run, inputs) for k, v in kwargs.items()}
        self.inputs = inputs
        self._finish = (*self._finish, (func, taken, named, rng))

    def inputs_later_than(self, args: tuple, kwargs: dict, run: object) -> bool:
        """Some argument is made by a later op than this one: replayed in program order, it would not be there."""
        values = (value_of(t, run) for t in tensors_in((args, list(kwargs.values()))))
        return any(v is not None and v.recipe is not None and v.recipe.number > self.number for v in values)

    def take(self, args: tuple, kwargs: dict, run: object) -> None:
        """Note the arguments: values of this run by reference, everything else held."""
        spared = left_out(self.func, args)
        if spared:
            args = tuple([None if i in spared else a for i, a in enumerate(args)])
        inputs: list[Value] = []
        self.inputs = inputs
        self.args = [a if type(a) in _PLAIN else _take(a, run, inputs) for a in args]
        self.kwargs = {k: _take(v, run, inputs) for k, v in kwargs.items()} if kwargs else None

    def _give(self, argument: Any) -> Any:
        kind = type(argument)
        if kind is View:
            base = argument.value.tensor
            assert base is not None  # materialise runs inputs first
            return argument.of(base)
        if kind is Kept:
            if argument.changed():
                raise _unreadable(self, argument)
            return argument.tensor
        if kind is list:
            return [self._give(a) for a in argument]
        return argument

    def replay(self, *, keep: bool, wanted: Container[Value] | None = None) -> None:
        """Run the op; hand its outputs to the Values that still live.

        Args:
            keep: Let nothing go: it will run again in another backward.
            wanted: A passing run: nothing goes either, and only these Values get an output.
        """
        args = [a if type(a) in _PLAIN else self._give(a) for a in self.args]
        kwargs = {k: self._give(v) for k, v in self.kwargs.items()} if self.kwargs else {}
        if self.rng is None:
            result = self.func(*args, **kwargs)
        else:
            with self.rng.restored():
                result = self.func(*args, **kwargs)
        for func, taken, named, rng in self._finish:
            own = [a.of(nth_tensor(result, a.output)) if isinstance(a, _Own) else self._give(a) for a in taken]
            with rng.restored() if rng is not None else nullcontext():
                func(*own, **{k: self._give(v) for k, v in named.items()})
            del own
        del args, kwargs
        if wanted is None:
            spent = self.inputs
            if not keep:
                self.args = self.kwargs = None
                self._finish = self.inputs = ()
            else:
                for value in spent:
                    had_by_one(value)
        for output, reference in self.outputs:
            made = reference()
            if made is None or made.recipe is None or (wanted is not None and made not in wanted):
                continue
            tensor = None if made.lent is None else made.found_again()
            made.tensor = nth_tensor(result, output) if tensor is None else tensor
            if wanted is None:
                made.lent = None
                made.left = made.users + min(made.left, 0) if keep else -1
            if made.original is not None:
                self._audit(made)
            if wanted is None and not keep:
                made.recipe = None

    def _audit(self, value: Value) -> None:
        """Compare the replay with the tensor that was kept beside it; where they differ, the kept one is right."""
        original, value.original = value.original, None
        assert original is not None and value.tensor is not None
        equal = same_bits(value.tensor, original)
        if not equal:
            # Another run would be wrong again: this one is made for good, whatever the plan and ``retain_graph`` say.
            value.tensor, value.recipe, value.left = original, None, 0
        if self.on_audit is not None:
            self.on_audit(equal)


def _unreadable(recipe: Recipe, argument: Kept) -> ReplayError:
    tensor = argument.tensor
    what = f"{recipe.func} in {recipe.where or 'the model'} cannot be replayed: a tensor of shape {list(tensor.shape)}"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return ReplayError(
            f"{what} that it read is a parameter that FSDP has freed.\n"
            "Use what a sharded module makes in that module, or through what it returns."
        )
    return ReplayError(
        f"{what} that it read was changed in place afterwards (version {tensor._version}, was {argument.version}).\n"
        "Change it before the forward pass or after backward, or fit the step that really runs."
    )


def _take(argument: Any, run: object, inputs: list[Value]) -> Any:
    """What a recipe notes of an argument; Values of this run also go into ``inputs``."""
    if isinstance(argument, torch.Tensor):
        value = value_of(argument, run)
        if value is None:
            return Kept(argument)
        inputs.append(value)
        return View(value, argument)
    if isinstance(argument, (list, tuple)):
        return [_take(a, run, inputs) for a in argument]
    return argument


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()`` that no dispatch mode sees: the tape must not take its own aliases for ops of the step."""
    torch._C._dispatch_tls_set_dispatch_key_excluded(DispatchKey.Python, True)
    try:
        return tensor.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(DispatchKey.Python, False)


def nth_tensor(result: Any, output: int) -> torch.Tensor:
    """The ``output``-th tensor of what an op returned, as the tracer counts them."""
    return result if isinstance(result, torch.Tensor) else list(tensors_in(result))[output]


def _same_storage(a: Any, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def value_of(tensor: torch.Tensor, run: object) -> Value | None:
    """The Value of a tensor dropped in this run and unchanged since; None: hold the tensor itself."""
    try:
        value = getattr(tensor.untyped_storage(), MARK, None)
    except (NotImplementedError, RuntimeError):  # sparse, functorch: no plain storage
        return None
    if value is None or value.run is not run or value.version != tensor._version:
        return None
    return value


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
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward and torch._C._autograd._get_current_graph_task_keep_graph()
