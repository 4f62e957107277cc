"""Values: what stands for a tensor while it is not there, and what is noted of one that is.

    Value   one dropped storage; among arguments and in autograd's hands it stands for the output as it was made.
            The recipe of an op with one dropped output is that output's Value itself.
    View    stands for any other tensor over that storage.
    Kept    a tensor that the plan keeps, and the version it had.

A Value hangs on its storage's Python object, so it dies with the storage and no address is ever mistaken for another.
Only autograd and recipes hold it otherwise: when nobody does, it is gone with its memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C import _dispatch_tls_set_dispatch_key_excluded as exclude_key
from torch.nn import Parameter

if TYPE_CHECKING:
    from lowtide.tape.execution_state import ExecutionState
    from lowtide.tape.recipes import Recipe

_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
MARK = "_lowtide_value"  # on the storage's Python object


class Value:
    """One dropped storage, at one version.

    Attributes:
        own: The tensor that the op returned, while it lives: whoever reads that very one needs no view noted.
        run: The forward pass that it belongs to.
        tensor: The output as replayed; None while it is dropped.
        users: How many saved tensors and recipes were given it.
        left: Under ``retain_graph``: users still to come in this backward; below 0, those that had it in passing.
        lent: Of a passing result: autograd has it.
        original: The dropped tensor itself, kept beside while it is audited.
        view: The last View noted of it, while that lives.
    """

    __slots__ = (
        "__weakref__", "_recipe", "left", "lent", "original", "output", "own", "run", "tensor", "users", "version",
        "view",
    )  # fmt: skip

    own: Callable[[], Tensor | None]
    tensor: Tensor | None
    original: Tensor | None
    lent: TransientResult | None
    view: weakref.ref[View] | None

    def __init__(self, recipe: Recipe, output: int, own: Tensor, run: ExecutionState) -> None:
        self._recipe: Recipe | None = recipe
        self.run = run
        self.begin(output, own)

    def begin(self, output: int, own: Tensor) -> None:
        """``own`` is about to be dropped: the ``output``-th tensor of what its op returned."""
        self.output = output
        self.version = own._version
        self.own = weakref.ref(own)
        self.tensor = self.original = self.lent = self.view = None
        self.users = self.left = 0

    @property
    def recipe(self) -> Recipe | None:
        """Makes it; None once it has been made for good."""
        return self._recipe

    def is_made_for_good(self) -> None:
        self._recipe = None

    @property
    def value(self) -> Value:
        return self  # as a View's

    def of(self, base: Tensor) -> Tensor:
        return base

    def lend(self) -> None:
        """Autograd has the tensor from here on; it is found again for as long as autograd does."""
        tensor, self.tensor = self.tensor, None
        assert tensor is not None
        self.lent = TransientResult(tensor)

    def found_again(self) -> Tensor | None:
        """The lent tensor, if autograd still has its storage."""
        storage = None if self.lent is None else self.lent.storage()
        if storage is None or self.lent is None:
            return None
        return self.lent.of(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))


class Shape:
    """How a tensor looks at its storage: ``as_strided`` metadata, dtype and the conjugate and negative bits."""

    __slots__ = ("conj", "dtype", "neg", "offset", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.size = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = dtype = tensor.dtype
        self.conj = dtype in _COMPLEX and tensor.is_conj()
        self.neg = tensor.is_neg()

    def of(self, base: Tensor) -> Tensor:
        if base.dtype is self.dtype:
            if self.offset == base.storage_offset():  # a quarter cheaper without
                tensor = base.as_strided(self.size, self.stride)
            else:
                tensor = base.as_strided(self.size, self.stride, self.offset)
        else:
            tensor = torch.empty(0, dtype=self.dtype, device=base.device)
            tensor.set_(base.untyped_storage(), self.offset, self.size, self.stride)
        if self.conj:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.neg else tensor


class View(Shape):
    """What is noted of a tensor over a dropped storage; made once, where the storage is made for good.

    Attributes:
        own: The tensor, while it lives.
    """

    __slots__ = ("__weakref__", "_made", "own", "value")

    def __init__(self, value: Value, tensor: Tensor) -> None:
        Shape.__init__(self, tensor)
        self.value = value
        self.own = weakref.ref(tensor)
        self._made: Tensor | None = None

    def of(self, base: Tensor) -> Tensor:
        made = self._made
        if made is None:
            made = Shape.of(self, base)
            if self.value.recipe is None:  # whoever holds this holds that storage anyway
                self._made = made
        return made


class TransientResult(Shape):
    """What is noted of a passing result that autograd has: where it is, not that it stay."""

    __slots__ = ("storage",)

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.storage = weakref.ref(tensor.untyped_storage())


class Kept:
    """A tensor that the plan keeps, and the version it has now."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Never hold what has a grad_fn: graph -> value -> recipe -> tensor -> graph would never be freed. (Asking for
        # ``grad_fn`` would make a Python object of every node: slow, and freeing a long chain of those overflows.)
        if type(tensor) is Parameter or not tensor.requires_grad or tensor.is_leaf or views_a_leaf(tensor):
            self.tensor = tensor
        else:
            self.tensor = sharing_version(tensor)
        try:
            self.version = tensor._version
        except RuntimeError:  # inference tensors count no writes; autograd never stores them, recipes may read them
            self.version = -1

    def changed(self) -> bool:
        return self.version >= 0 and self.tensor._version != self.version


def placeholder_for(tensor: Tensor, run: ExecutionState) -> Value | View | None:
    """What stands for a tensor dropped in this run and unchanged since; None: hold the tensor itself."""
    try:
        value = getattr(tensor.untyped_storage(), MARK, None)
    except (NotImplementedError, RuntimeError):  # sparse, functorch: no plain storage
        return None
    if value is None or value.run is not run or value.version != tensor._version:
        return None
    value.users += 1
    if value.own() is tensor:
        return value
    view = None if value.view is None else value.view()
    if view is None or view.own() is not tensor:  # mostly an op and its backward read the same
        view = View(value, tensor)
        value.view = weakref.ref(view)
    return view


def value_of(tensor: Tensor, run: ExecutionState) -> Value | None:
    """The Value of a tensor dropped in this run and unchanged since, for a look: nobody gets it."""
    noted = placeholder_for(tensor, run)
    if noted is None:
        return None
    noted.value.users -= 1
    return noted.value


def views_a_leaf(tensor: Tensor) -> bool:
    """Its history is views only (``weight.t()``): no graph that could lead back to whoever holds it."""
    base = tensor._base
    return base is not None and base.is_leaf


def sharing_version(tensor: Tensor) -> Tensor:
    """``tensor`` without history, counting in-place writes together with it.

    Inside ``__torch_dispatch__`` a plain ``detach`` gets a version counter of its own, and a guard on it never fires.
    """
    exclude_key(DispatchKey.ADInplaceOrView, False)
    try:
        return tensor.detach()
    finally:
        exclude_key(DispatchKey.ADInplaceOrView, True)


def detached(tensor: Tensor) -> Tensor:
    """``tensor.detach()`` that no dispatch mode sees: the tape must not take its own aliases for ops of the step."""
    exclude_key(DispatchKey.Python, True)
    try:
        return tensor.detach()
    finally:
        exclude_key(DispatchKey.Python, False)
