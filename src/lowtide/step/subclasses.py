"""DTensor, quantised weights and other tensors that only wrap plain ones.

Below autograd a dispatch mode declines an op on wrappers; it then sees the op on the plain parts and each collective by
itself. Autograd stores the wrappers; a saved-tensor hook packs the parts and rebuilds the wrapper.

An in-place write to a wrapper moves the version counter of the wrapper alone, and what is recorded are the parts. So
whoever sees such a write moves the counters of the parts, too.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.step.operators import is_wrapper_type, written_tensors

_OF_RANKS = "torch.distributed."


def plain_tensors(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that ``tensors`` wrap; of a plain one itself."""
    for tensor in tensors:
        if not is_wrapper_type(type(tensor)):
            yield tensor
        else:
            inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            yield from plain_tensors(*(t for t in inner if isinstance(t, torch.Tensor)))


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 gathers and shards the parameters of ``module`` around its call."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes longer than looking
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def wrapped_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of ``model`` that are DTensors: shards, or whole by turns."""
    if "torch.distributed.tensor" not in sys.modules:  # importing it takes longer than looking
        return []
    return [p for p in model.parameters() if is_of_ranks(p)]


def is_of_ranks(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, of which each rank has a part."""
    return is_wrapper_type(type(tensor)) and type(tensor).__module__.startswith(_OF_RANKS)


def fake_mode_is_on() -> bool:
    """Shapes are being worked out on fake tensors, as DTensor does at the first sight of an op."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def bump_versions_of_parts(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The parts that an op on wrappers writes, each with its version moved."""
    written = list(plain_tensors(*(t for t in written_tensors(func, args, kwargs) if is_wrapper_type(type(t)))))
    for part in written:
        if not part.is_inference():
            torch.autograd.graph.increment_version(part)
    return written


class WrapperVersions:
    """The versions of wrappers before a forward pass."""

    __slots__ = ("_seen",)

    def __init__(self, shards: list[nn.Parameter]) -> None:
        self._seen = [(p, p._version) for p in shards]

    def catch_up(self) -> None:
        """A parameter written since then, by an optimizer mostly: its parts count that too, and replays refuse."""
        for i, (p, version) in enumerate(self._seen):
            if p._version != version:
                self._seen[i] = p, p._version
                for part in plain_tensors(p):
                    torch.autograd.graph.increment_version(part)


class PackedWrapper:
    """A wrapper as autograd stores it: its parts, each packed by itself, and how to rebuild it from them."""

    __slots__ = ("_alias", "_parts", "_rebuild", "_size", "_version")

    def __init__(self, tensor: Any, pack: Callable[[torch.Tensor], Any]) -> None:
        kind, self._size, stride = type(tensor), tensor.size(), tensor.stride()
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        others = {name: value for name, value in inner.items() if not isinstance(value, torch.Tensor)}
        self._parts = {name: pack(value) for name, value in inner.items() if name not in others}
        self._rebuild: Callable[[dict[str, torch.Tensor]], torch.Tensor] = lambda made: kind.__tensor_unflatten__(
            {**made, **others}, context, self._size, stride
        )
        if "_local_tensor" in inner:  # a DTensor; not every layout of one can be unflattened (2.13: strided shards)
            spec = tensor._spec
            self._rebuild = lambda made: kind(made["_local_tensor"], spec, requires_grad=False)
        self._version, self._alias = tensor._version, _empty_alias(tensor)

    def unpack(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Raises: RuntimeError: the wrapper was changed in place, as plain autograd does."""
        if self._alias is not None and self._alias._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[DTensor {list(self._size)}] is at version {self._alias._version}; expected version "
                f"{self._version} instead."
            )
        return self._rebuild({name: unpack(packed) for name, packed in self._parts.items()})


def _empty_alias(tensor: torch.Tensor) -> torch.Tensor | None:
    """A wrapper that counts versions with ``tensor`` and holds no memory."""
    if not hasattr(tensor, "_local_tensor"):
        return None
    with _disable_current_modes(), torch.no_grad():
        alias = tensor.detach()
    alias._local_tensor = None
    return alias
