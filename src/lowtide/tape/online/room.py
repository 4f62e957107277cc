"""The bytes that an op is about to allocate: those of its last run; before its first run, those of its meta kernel.

Without a meta kernel's answer (sizes depend on values, or there is no such kernel) they are guessed from the arguments.
"""

from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from lowtide.device.block_size import in_blocks
from lowtide.tracing.operators import packet_name, tensors_in

# Views of what they read: they make nothing.
_VIEWS = frozenset({
    "aten.view", "aten.t", "aten.transpose", "aten._unsafe_view", "aten.expand", "aten.unsqueeze", "aten.squeeze",
    "aten.slice", "aten.detach", "aten.alias", "aten.permute", "aten.select", "aten.split", "aten.as_strided",
    "aten.unbind", "aten.split_with_sizes", "aten.chunk", "aten._reshape_alias", "aten.diagonal",
})  # fmt: skip
# Kernels that take reordered copies of what they read and make, which no allocation of the tape's shows beforehand.
_CONVOLUTIONS = frozenset({"aten.convolution", "aten.convolution_backward"})
_ATTENTION = frozenset({"aten._scaled_dot_product_flash_attention_for_cpu"})
_HALF = frozenset({torch.bfloat16, torch.float16})
_PRODUCTS = {"aten.mm": (0, 1), "aten.bmm": (0, 1), "aten.addmm": (1, 2), "aten.baddbmm": (1, 2)}


class ExpectedBytes:
    """What each op made when it ran on arguments of these shapes.

    Attributes:
        inputs_bytes: Of the last step: what was there before it and no call of the model was given (targets, mostly).
            None before the first.
    """

    def __init__(self) -> None:
        self.inputs_bytes: int | None = None
        self._made: dict[tuple, int] = {}
        self._workspace: dict[tuple, int] = {}
        self._workspace_share: dict[tuple, float] = {}  # the most, of what an op with these dtypes reads and makes

    def key(self, func: Any, args: tuple) -> tuple:
        return (func, *((tuple(t.shape), t.dtype) for t in tensors_in(args)))

    def of(self, key: tuple, func: Any, args: tuple, kwargs: dict[str, Any]) -> int:
        """Bytes that ``func`` is about to allocate, workspace included."""
        made = self._made.get(key)
        if made is None:
            made = _made_on_meta(func, args, kwargs)
        if made is None:
            made = _first_guess(func, args)
        workspace = self._workspace.get(key)
        if workspace is None:
            moved = made + sum(t.numel() * t.element_size() for t in tensors_in(args))
            share = self._workspace_share.get(_without_shapes(key))
            workspace = int((_first_share(func, args) if share is None else share) * moved)
        return made + workspace

    def known_workspace(self, key: tuple) -> int:
        """What the kernel is known to allocate beside what it makes; 0 before that was measured."""
        return self._workspace.get(key, 0)

    def learn(self, key: tuple, made: int) -> None:
        self._made[key] = made

    def learn_workspace(self, key: tuple, workspace_bytes: int) -> None:
        """What the kernel allocates beside what it makes; of other shapes it is expected to take as large a share."""
        self._workspace[key] = workspace_bytes
        moved = self._made.get(key, 0) + sum(prod(shape) * dtype.itemsize for shape, dtype in key[1:])
        kind = _without_shapes(key)
        self._workspace_share[kind] = max(self._workspace_share.get(kind, 0.0), workspace_bytes / max(moved, 1))


def _without_shapes(key: tuple) -> tuple:
    return (key[0], *(dtype for _, dtype in key[1:]))


def _first_share(func: Any, args: tuple) -> float:
    """Workspace of a kernel that has not been measured, as a share of what it reads and makes."""
    name, dtypes = packet_name(func), {t.dtype for t in tensors_in(args) if t.is_floating_point()}
    on_cpu = all(t.device.type == "cpu" for t in tensors_in(args))
    if name in _CONVOLUTIONS or (name in _PRODUCTS and on_cpu and dtypes & _HALF):
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
    storages = {s._cdata: s.nbytes() for result in results if (s := result.untyped_storage())._cdata not in given}
    return sum(in_blocks(size, device_type) for size in storages.values())


def _first_guess(func: Any, args: tuple) -> int:
    name, tensors = packet_name(func), list(tensors_in(args))
    if name in _VIEWS or not tensors:
        size = next((a for a in args if isinstance(a, (list, torch.Size))), None) if not tensors else None
        return 4 * prod(size) if size is not None and all(isinstance(n, int) for n in size) else 0
    if name in _PRODUCTS:
        left, right = (args[i] for i in _PRODUCTS[name])
        rows = prod(left.shape[:-1])
        return int(rows * right.shape[-1] * left.element_size())
    return max(t.numel() * t.element_size() for t in tensors)
