"""The bytes that an op is about to allocate: those of its last run; before its first run, those of its meta kernel.

Asked exactly only where memory is nearly short: else twice the most that the operator has needed so far will do.

Without a meta kernel's answer (sizes depend on values, or there is no such kernel) they are guessed from the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from lowtide.device.block_size import in_blocks
from lowtide.device.kept_workspaces import product_workspace_bytes
from lowtide.device.names import is_accelerator
from lowtide.hollow.cuda_workspaces import has_rule
from lowtide.hollow.kernels_here import unmeasured_workspace_bytes
from lowtide.hollow.output_specs import keeps_all_losses
from lowtide.step.operators import OPERATORS, may_write_undeclared, packet_name, tensors_in, tensors_of

# Views of what they read: they make nothing.
_VIEWS = frozenset({
    "aten.view", "aten.t", "aten.transpose", "aten._unsafe_view", "aten.expand", "aten.unsqueeze", "aten.squeeze",
    "aten.slice", "aten.detach", "aten.alias", "aten.permute", "aten.select", "aten.split", "aten.as_strided",
    "aten.unbind", "aten.split_with_sizes", "aten.chunk", "aten._reshape_alias", "aten.diagonal",
})  # fmt: skip
# Kernels that take reordered copies of what they read and make, which no allocation of the tape's shows beforehand.
_CONVOLUTIONS = frozenset({"aten.convolution", "aten.convolution_backward"})
_ATTENTION = frozenset({"aten._scaled_dot_product_flash_attention_for_cpu"})
# Of kernels of the CPU: a loss for each element before their mean, of some in the result's memory as well, which no
# meta kernel says; exponentials before their sum.
_FIRST_SHARES = {
    "aten.mse_loss": 1.0, "aten.smooth_l1_loss": 1.0, "aten.huber_loss": 0.5,
    "aten.binary_cross_entropy_with_logits": 1.0, "aten.logsumexp": 1.0,
}  # fmt: skip
_MOST_LEARNED = 64  # sequences of forward ops whose backwards are remembered
_HALF = frozenset({torch.bfloat16, torch.float16})
_PRODUCTS = {"aten.mm": (0, 1), "aten.bmm": (0, 1), "aten.addmm": (1, 2), "aten.baddbmm": (1, 2)}


class Need:
    """What one operator has needed so far.

    Attributes:
        facts: What is known of it besides.
        has_workspace: Some kernel of it allocates more than it makes, as was measured.
    """

    __slots__ = ("_is_product", "_most", "_read_bytes", "_varies_on_device", "facts", "has_workspace")

    def __init__(self, func: Any) -> None:
        self.facts = OPERATORS[func]
        self._read_bytes, self._most = -1, 0
        self._is_product = packet_name(func) in _PRODUCTS
        self._varies_on_device = _varies_on_device(func)
        self.has_workspace = False

    @property
    def asks(self) -> bool:
        """More is to be seen to than what it makes: it writes, draws random numbers, or takes workspace."""
        return self.facts.writes or self.facts.random or self.has_workspace

    def at_most(self, read_bytes: int, inputs: Sequence[torch.Tensor]) -> float:
        """Bytes that it allocates on ``inputs`` of so many bytes, at most; infinite where nobody knows.

        Twice what it has needed on as many: what it makes depends on shapes, too. Of a product of matrices any multiple
        of what it reads may come, so its shape tells. What a device's reduction takes depends on which dimensions go: a
        sum over rows may take twice what it reads, after a sum of as many bytes that took nothing.
        """
        if read_bytes > self._read_bytes:
            return math.inf
        if self._varies_on_device and inputs and is_accelerator(inputs[0].device):
            return math.inf
        if self._is_product and len(inputs) > 1:
            left, right = inputs[-2:]
            rows = left.numel() // max(left.shape[-1], 1)
            return rows * right.shape[-1] * left.itemsize + self._most
        return 2 * self._most

    def note(self, read_bytes: int, needed: int) -> None:
        """It has needed so much, at most, on tensors of so many bytes."""
        if needed > self._most:
            self._most = needed
        if read_bytes > self._read_bytes:
            self._read_bytes = read_bytes


class _Needs(dict[Any, Need]):
    def __missing__(self, func: Any) -> Need:
        found = self[func] = Need(func)
        return found


class LearnedBackward(NamedTuple):
    """What the ops of a backward hold; see ``learned_backward.py``.

    Attributes:
        held_bytes: At its start, when each tensor is unpacked, and at its end.
        most_bytes: At most, before the first of these, between one and the next, and behind the last one. What dies
            meanwhile of what was there before counts against it.
        unpacked: Numbers of the claims that are unpacked, in order; 0: of none.
    """

    held_bytes: Sequence[int]
    most_bytes: Sequence[int]
    unpacked: Sequence[int]


class KnownBackwards:
    """By sequence of forward ops; None of one whose ops have to be seen. Outlives a step."""

    def __init__(self) -> None:
        self._known: dict[Any, LearnedBackward | None] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self._known

    def get(self, key: Any) -> LearnedBackward | None:
        return self._known.get(key)

    def learn(self, key: Any, learned: LearnedBackward | None) -> None:
        if len(self._known) >= _MOST_LEARNED:
            self._known.clear()
        self._known[key] = learned


class ExpectedBytes:
    """What each op made when it ran on arguments of these shapes.

    Shapes are asked for only where the most that the operator has needed so far might not fit.

    Attributes:
        needs: By operator: what it has needed so far.
        backwards: What backwards have held so far.
        inputs_bytes: Of the last step: what was there before it and no call of the model was given (targets, mostly).
            None before the first.
    """

    def __init__(self) -> None:
        self.inputs_bytes: int | None = None
        self.needs = _Needs()
        self.backwards = KnownBackwards()
        self._needed: dict[Key, int] = {}  # as ``of`` has said
        self._made: dict[Key, int] = {}
        self._workspace: dict[Key, int] = {}
        self._workspace_share: dict[Key, float] = {}  # the most, of what an op with these dtypes reads and makes

    def key(self, func: Any, args: tuple) -> Key:
        tensors = tensors_of(args)
        return key_of(func, all([t.is_cpu for t in tensors]), [(t.shape, t.dtype) for t in tensors], args)

    def of(self, key: Key, func: Any, args: tuple, kwargs: dict[str, Any]) -> int:
        """Bytes that ``func`` is about to allocate, workspace included. What it has made before needs no arguments."""
        if (known := self._needed.get(key)) is not None:
            return known
        made = self._made.get(key)
        if made is None:
            made = _made_on_meta(func, args, kwargs)
        if made is None:
            made = _first_guess(func, args)
        workspace = self._workspace.get(key)
        if workspace is None:
            workspace = self._foreseen_workspace(key, func, args, made)
        self._needed[key] = made + workspace
        return made + workspace

    def _foreseen_workspace(self, key: Key, func: Any, args: tuple, made: int) -> int:
        """Of a kernel that was not measured on arguments of these shapes."""
        device = _accelerator_of(args)
        if device is not None and packet_name(func) in _PRODUCTS:
            return product_workspace_bytes(device)  # whatever the shapes
        if device is not None and (foreseen := unmeasured_workspace_bytes(func, args, device)):
            return foreseen
        share = self._workspace_share.get(_without_shapes(key))
        share = _first_share(func, key) if share is None else share
        return int(share * (made + _read_bytes(key))) if share else 0

    def known_workspace(self, key: Key) -> int:
        """What the kernel is known to allocate beside what it makes; 0 before that was measured."""
        return self._workspace.get(key, 0)

    def learn(self, key: Key, made: int) -> None:
        if self._made.get(key) != made:
            self._made[key] = made
            self._needed.pop(key, None)

    def learn_workspace(self, key: Key, workspace_bytes: int) -> None:
        """What the kernel allocates beside what it makes; of other shapes it is expected to take as large a share.

        The most of arguments of these shapes: a convolution copies an input besides whose memory is in another order.
        """
        self._needed.clear()  # those of other shapes follow
        self._workspace[key] = workspace_bytes = max(workspace_bytes, self._workspace.get(key, 0))
        if workspace_bytes:
            self.needs[key[0]].has_workspace = True
        moved = self._made.get(key, 0) + _read_bytes(key)
        kind = _without_shapes(key)
        self._workspace_share[kind] = max(self._workspace_share.get(kind, 0.0), workspace_bytes / max(moved, 1))


# An operator, whether all that it reads is on the CPU, the numbers among its arguments where these decide what a
# device's kernel takes besides (dimensions of a reduction), and shape and dtype of each tensor.
Key = tuple[Any, ...]


def key_of(func: Any, on_cpu: bool, tensors: Iterable[tuple[Any, torch.dtype]], args: Iterable[Any]) -> Key:
    return (func, on_cpu, () if on_cpu or not _varies_on_device(func) else _numbers(args), *tensors)


@cache
def _varies_on_device(func: Any) -> bool:
    """What it takes besides depends on more than how much it reads. A product's shape tells what it makes."""
    name = packet_name(func)
    return name not in _PRODUCTS and has_rule(name)


def _numbers(args: Iterable[Any]) -> tuple[Any, ...]:
    lists = [a if isinstance(a, (list, tuple)) else (a,) for a in args]
    return tuple(tuple(n for n in numbers if isinstance(n, int)) for numbers in lists)


def _without_shapes(key: Key) -> Key:
    return (key[0], *(dtype for _, dtype in key[3:]))


def _read_bytes(key: Key) -> int:
    return sum(prod(shape) * dtype.itemsize for shape, dtype in key[3:])


def _accelerator_of(args: tuple) -> torch.device | None:
    return next((t.device for t in tensors_in(args) if is_accelerator(t.device)), None)


def _first_share(func: Any, key: Key) -> float:
    """Workspace of a kernel that has not been measured, as a share of what it reads and makes."""
    name, dtypes = packet_name(func), {dtype for _, dtype in key[3:] if dtype.is_floating_point}
    if key[1] and name in _FIRST_SHARES:
        return _FIRST_SHARES[name]
    if name in _CONVOLUTIONS or (name in _PRODUCTS and key[1] and dtypes & _HALF):
        return 1.0  # reordered copies
    return 0.5 if name in _ATTENTION or len(dtypes) > 1 else 0.0  # blocks of scores; a copy of another dtype


def _made_on_meta(func: Any, args: tuple, kwargs: dict[str, Any]) -> int | None:
    """Bytes of the storages that ``func`` makes, from a run on tensors without memory; None where that cannot tell."""
    if func.namespace != "aten" or packet_name(func) in _CONVOLUTIONS or next(tensors_in(args), None) is None:
        return None
    device_type = next(tensors_in(args)).device.type
    given: set[int] = set()
    twins: list[torch.Tensor] = []  # alive until the end: no storage of a result has the address of one

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        given.add(found.untyped_storage()._cdata)
        twins.append(found)
        return found

    try:
        with _disable_current_modes():  # another model's watch below would take these ops for its own
            args, kwargs = tree_map_only(torch.Tensor, twin, (args, kwargs))
            results = list(tensors_in(func(*args, **({**kwargs, "device": "meta"} if "device" in kwargs else kwargs))))
    except Exception:
        return None
    if any(result.device.type != "meta" or result.layout is not torch.strided for result in results):
        return None
    if device_type != "cpu" and keeps_all_losses(func, args):
        return in_blocks(max(t.nbytes for t in tensors_in(args)), device_type)
    storages = {s._cdata: s.nbytes() for result in results if (s := result.untyped_storage())._cdata not in given}
    return sum(in_blocks(size, device_type) for size in storages.values())


def _first_guess(func: Any, args: tuple) -> int:
    if may_write_undeclared(func):  # a collective, into what it is given
        return 0
    name, tensors = packet_name(func), list(tensors_in(args))
    if name in _VIEWS or not tensors:
        size = next((a for a in args if isinstance(a, (list, torch.Size))), None) if not tensors else None
        return 4 * prod(size) if size is not None and all(isinstance(n, int) for n in size) else 0
    if name in _PRODUCTS:
        left, right = (args[i] for i in _PRODUCTS[name])
        rows = prod(left.shape[:-1])
        return int(rows * right.shape[-1] * left.element_size())
    return max(t.numel() * t.element_size() for t in tensors)
