"""Placeholders for dropped tensors, and what is stored of kept ones.

    Value   stands for the output of an op as the op returned it, while its storage is dropped.
            The recipe of an op with one dropped output is itself that output's Value.
    View    stands for any other tensor over that storage.
    Kept    a tensor that the plan keeps, and the version it had.
    GatheredView  stands for a parameter, or a view of one, that has memory only while ZeRO-3 has gathered it.

The storage's Python object holds its Value, so the Value dies with the storage and no address is mistaken for another.
Otherwise only autograd and recipes hold a Value: when none of them does, its tensor is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C import _dispatch_tls_is_dispatch_key_excluded as key_is_excluded
from torch._C import _dispatch_tls_set_dispatch_key_excluded as exclude_key
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.device.dispatch import bytes_of
from lowtide.step.execution_state import ExecutionState
from lowtide.step.operators import storage_of, written_arguments, written_tensors
from lowtide.step.sharding.zero3 import GatheredParameters, is_whole
from lowtide.step.storage_bits import Seal

_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
MARK = "_lowtide_value"  # attribute of the storage's Python object that holds the Value


class Source(Protocol):
    """What gives Values their tensors again: a recipe, which replays an op, or an offload, which is fetched."""

    number: int  # position in the forward pass; sources of one burst run in this order
    inputs: tuple[Value, ...]  # those that it reads
    transient_replays: int  # left before the final one
    once_a_pass: bool  # each of these makes what one of several backward passes needs

    def replay(self, *, keep: bool, wanted: Container[Value] | None = None) -> None: ...

    def values(self) -> Sequence[Value]: ...


class Value:
    """One dropped storage, at one version.

    Attributes:
        users: How many saved tensors and recipes hold it.
        uses_left: Under ``retain_graph``: users still to come in this backward. Below 0: users that were given a
            transient result.
    """

    __slots__ = (
        "__weakref__", "_source", "differs", "original", "output", "output_ref", "run", "seal", "tensor", "transient",
        "users", "uses_left", "version", "view",
    )  # fmt: skip

    output_ref: Callable[[], Tensor | None]  # the tensor that the op returned, which needs no View
    tensor: Tensor | None  # the output as replayed
    seal: Seal | None  # of what was dropped, where that is checked this time
    differs: bool  # from what was dropped, in a rehearsal
    original: Tensor | None  # the dropped tensor itself, where its replay is known to differ
    transient: TransientResult | None  # that autograd holds
    view: weakref.ref[View] | None  # the last one

    def __init__(self, source: Source, output: int, tensor: Tensor, run: ExecutionState) -> None:
        self._source: Source | None = source
        self.run = run
        self.begin(output, tensor)

    def begin(self, output: int, tensor: Tensor) -> None:
        """``tensor`` is about to be dropped: the ``output``-th of what its op returned."""
        self.output = output
        self.version = tensor._version
        self.output_ref = weakref.ref(tensor)
        self.tensor = self.original = self.transient = self.view = self.seal = None
        self.users = self.uses_left = 0
        self.differs = False

    @property
    def source(self) -> Source | None:
        """What gives its tensor again; None after the final replay."""
        return self._source

    def uses_in_this_pass(self) -> int:
        """Users still to come in a backward pass that leaves its graph for another one."""
        return self.users if self.run.knows_passes else self.users + min(self.uses_left, 0)

    def make_final(self) -> None:
        """``tensor`` stays from now on: the source is not needed any more."""
        self._source = None

    @property
    def value(self) -> Value:
        return self  # as a View's

    def view_of(self, base: Tensor) -> Tensor:
        return base

    def release_to_autograd(self) -> None:
        """Forget the tensor, which autograd holds; ``transient_tensor`` finds it again as long as autograd does."""
        tensor, self.tensor = self.tensor, None
        assert tensor is not None
        self.transient = TransientResult(tensor)

    def transient_tensor(self) -> Tensor | None:
        """The transient result, if autograd still holds its storage."""
        storage = None if self.transient is None else self.transient.storage()
        if storage is None or self.transient is None:
            return None
        return self.transient.view_of(bytes_of(storage))


class ViewSpec:
    """How to make a view of a storage: ``as_strided`` metadata, dtype, and the conjugate and negative bits."""

    __slots__ = ("conj", "dtype", "neg", "offset", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.size = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = dtype = tensor.dtype
        self.conj = dtype in _COMPLEX and tensor.is_conj()
        self.neg = tensor.is_neg()

    def view_of(self, base: Tensor) -> Tensor:
        if base.dtype is self.dtype:
            if self.offset == base.storage_offset():  # a quarter cheaper without the offset
                tensor = base.as_strided(self.size, self.stride)
            else:
                tensor = base.as_strided(self.size, self.stride, self.offset)
        else:
            tensor = torch.empty(0, dtype=self.dtype, device=base.device)
            tensor.set_(base.untyped_storage(), self.offset, self.size, self.stride)
        if self.conj:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.neg else tensor


class View(ViewSpec):
    """Stands for a tensor over a dropped storage; made only once where the storage's replay is final."""

    __slots__ = ("__weakref__", "_made", "tensor_ref", "value")

    def __init__(self, value: Value, tensor: Tensor) -> None:
        ViewSpec.__init__(self, tensor)
        self.value = value
        self.tensor_ref = weakref.ref(tensor)
        self._made: Tensor | None = None

    def view_of(self, base: Tensor) -> Tensor:
        made = self._made
        if made is None:
            made = ViewSpec.view_of(self, base)
            if self.value.source is None:  # whoever holds this View holds the storage anyway
                self._made = made
        return made


class TransientResult(ViewSpec):
    """Where a transient result is that autograd holds; does not keep it alive."""

    __slots__ = ("storage",)

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.storage = weakref.ref(tensor.untyped_storage())


class MadeAgain(weakref.ref):
    """The mark of a storage that a replay has made: its Value, and the version that its tensor had then."""

    __slots__ = ("version",)

    version: int


class Kept:
    """A tensor that the plan keeps, and the version it has now."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # A tensor with a grad_fn would close a cycle that is never freed: graph -> value -> recipe -> tensor -> graph.
        # Asking for ``grad_fn`` would make a Python object of every node: slow, and freeing a long chain overflows.
        if type(tensor) is Parameter or not tensor.requires_grad or tensor.is_leaf or is_view_of_leaf(tensor):
            self.tensor = tensor
        else:
            self.tensor = sharing_version(tensor)
        try:
            self.version = tensor._version
        except RuntimeError:  # inference tensors count no writes; only recipes hold them
            self.version = -1

    def changed(self) -> bool:
        return self.version >= 0 and self.tensor._version != self.version


class GatheredView(ViewSpec):
    """Names a parameter that ZeRO-3 gathers and frees, and the part of it that was read. Holds none of its memory."""

    __slots__ = ("_optimizer_steps", "_version", "parameter")

    def __init__(self, parameter: Parameter, tensor: Tensor, gathered: GatheredParameters) -> None:
        super().__init__(tensor)
        self.offset -= parameter.storage_offset()
        self.parameter, self._version = parameter, parameter._version
        self._optimizer_steps = gathered.optimizer_steps

    def why_unreadable(self, gathered: GatheredParameters) -> str:
        """What has become of the parameter; "" if it is as it was."""
        if not is_whole(self.parameter):
            return "freed"
        unchanged = self.parameter._version == self._version and gathered.optimizer_steps == self._optimizer_steps
        return "" if unchanged else "changed"

    def tensor(self) -> Tensor:
        """The same part of the parameter as it is gathered now."""
        return self.parameter.as_strided(self.size, self.stride, self.parameter.storage_offset() + self.offset)


def gathered_view(tensor: Tensor, run: ExecutionState) -> GatheredView | None:
    """What stands for ``tensor`` if it is over a parameter that ZeRO-3 gathers and frees; else None."""
    if run.gathered is None or (parameter := run.gathered.parameter_of(tensor)) is None:
        return None
    if tensor.dtype != parameter.dtype or tensor.is_neg() or (tensor.dtype in _COMPLEX and tensor.is_conj()):
        return None
    return GatheredView(parameter, tensor, run.gathered)


def placeholder_for(tensor: Tensor, run: ExecutionState) -> Value | View | None:
    """What stands for a tensor dropped in this run and unchanged since; None if the tensor itself must be held."""
    try:
        value = getattr(tensor.untyped_storage(), MARK, None)
    except (NotImplementedError, RuntimeError):  # sparse, functorch: no plain storage
        return None
    version = None if value is None else value.version
    if type(value) is MadeAgain:
        value = value()
    if value is None or value.run is not run or version != tensor._version:
        return None
    value.users += 1
    if value.output_ref() is tensor:
        return value
    view = None if value.view is None else value.view()
    if view is None or view.tensor_ref() is not tensor:  # mostly an op and its backward read the same tensor
        view = View(value, tensor)
        value.view = weakref.ref(view)
    return view


def stand_for(value: Value, tensor: Tensor) -> None:
    """``tensor`` has been made again: where it is saved once more, ``value`` stands for it.

    The mark is weak: the Value may hold this storage. What was written in place after its op, as the mask of a dropout,
    is made again with other counts of writes.
    """
    storage = tensor.untyped_storage()
    if MARK not in storage.__dict__:
        mark = storage.__dict__[MARK] = MadeAgain(value)
        mark.version = tensor._version


def value_of(tensor: Tensor, run: ExecutionState) -> Value | None:
    """The Value of a tensor dropped in this run and unchanged since; does not count as a user."""
    placeholder = placeholder_for(tensor, run)
    if placeholder is None:
        return None
    placeholder.value.users -= 1
    return placeholder.value


def unmark_written(func: Any, args: tuple, kwargs: dict) -> None:
    """After an unplanned write a recipe no longer gives its tensor; a write through ``.data`` counts no version."""
    if written_arguments(func):
        for tensor in written_tensors(func, args, kwargs):
            storage = storage_of(tensor)
            if storage is not None:
                storage.__dict__.pop(MARK, None)


def is_view_of_leaf(tensor: Tensor) -> bool:
    """Whether its history is views of a leaf only (``weight.t()``), with no graph that could lead back to a holder."""
    base = tensor._base
    return base is not None and base.is_leaf


def sharing_version(tensor: Tensor) -> Tensor:
    """``tensor`` without history, with the same version counter.

    Inside ``__torch_dispatch__`` a plain ``detach`` gets a version counter of its own, which misses later writes.
    """
    # Not always excluded here: an op that autograd does not wrap (``set_``, say) reaches a mode with the key on, and a
    # key left excluded would stop every version counter of this thread.
    before = key_is_excluded(DispatchKey.ADInplaceOrView)
    exclude_key(DispatchKey.ADInplaceOrView, False)
    try:
        return tensor.detach()
    finally:
        exclude_key(DispatchKey.ADInplaceOrView, before)


def detached(tensor: Tensor) -> Tensor:
    """``tensor.detach()``, unseen by dispatch modes: the tape must not take it for an op of the step.

    Of a subclass that dispatches itself (a nested tensor), whose ``detach`` is Python, modes alone are off.
    """
    if type(tensor) is not Tensor and type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        with _disable_current_modes():
            return tensor.detach()
    before = key_is_excluded(DispatchKey.Python)
    exclude_key(DispatchKey.Python, True)
    try:
        return tensor.detach()
    finally:
        exclude_key(DispatchKey.Python, before)


def modified_in_place(tensor: Tensor, size: Sequence[int], expected_version: int) -> RuntimeError:
    """Autograd's own error for a saved tensor that was changed, since hooks switch its check off."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(size)}] is at version {tensor._version}; expected version {expected_version} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
