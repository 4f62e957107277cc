"""What an optimizer keeps and needs, counted while its own ``step()`` runs on hollow parameters."""

import inspect
import sys
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.device.dispatch import tensors_in
from lowtide.hollow.memory import hollow_like
from lowtide.hollow.mode import FACTORIES


class _Counting(TorchDispatchMode):
    """Live bytes of storages that are made inside."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__()
        self._block_bytes = block_bytes
        self.live_bytes = self.peak_bytes = 0
        self.on_host = False  # what is made now lies on the host
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs or {}))}
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_in(output):
            storage = tensor.untyped_storage()
            if not self.on_host and storage._cdata not in given and storage._cdata not in self._known:
                self._add(storage)
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // self._block_bytes) * self._block_bytes

        def died(_: Any) -> None:
            self._known.pop(key, None)
            self.live_bytes -= size

        self._known[key] = weakref.ref(storage, died)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class _HostScalars(TorchFunctionMode):
    """A factory that is told no device makes its tensor on the host, as ``torch.zeros(())`` for a step's number."""

    def __init__(self, counting: _Counting) -> None:
        super().__init__()
        self._counting = counting

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in FACTORIES or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        self._counting.on_host = True
        try:
            return func(*args, **kwargs)
        finally:
            self._counting.on_host = False


def hollow_optimizer_bytes(
    kind: type[torch.optim.Optimizer],
    settings: dict[str, Any],
    parameters: list[torch.nn.Parameter],
    *,
    kernels: str,
    block_bytes: int = 1,
) -> tuple[int, int]:
    """(state, temporaries of a later ``step()``) in bytes; to be called under a ``HollowMode``.

    Args:
        kernels: On ``cuda`` most optimizers with neither ``foreach`` nor ``fused`` set run foreach kernels.
    """
    if not parameters:
        return 0, 0
    known = inspect.signature(kind).parameters
    chosen = {name: value for name, value in settings.items() if name in known}
    on_cuda = kernels == "cuda"
    if on_cuda and _prefers_lists(kind, chosen) and not chosen.get("fused") and chosen.get("foreach") is None:
        chosen["foreach"] = True
    own = [torch.nn.Parameter(hollow_like(p)) for p in parameters]
    for parameter in own:
        parameter.grad = hollow_like(parameter)
    first, later = _Counting(block_bytes), _Counting(block_bytes)
    with torch.no_grad(), _capturable_here(kind) if on_cuda else nullcontext():
        with first, _HostScalars(first) if on_cuda else nullcontext():
            optimizer = kind(own, **chosen)  # some make their state here
            optimizer.step()
        state_bytes = first.live_bytes
        with later, _HostScalars(later) if on_cuda else nullcontext():
            optimizer.step()
    return state_bytes, later.peak_bytes


def _prefers_lists(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> bool:
    """Its module asks which parameters foreach kernels take; Adafactor's does not, to save memory."""
    if isinstance(settings.get("lr"), torch.Tensor) and not settings.get("capturable"):
        return False
    return any(hasattr(module, "_default_to_fused_or_foreach") for module in _modules(kind))


def _modules(kind: type[torch.optim.Optimizer]) -> list[Any]:
    """Of the class and its bases, but for ``Optimizer``'s own."""
    return [sys.modules[base.__module__] for base in kind.__mro__ if base not in torch.optim.Optimizer.__mro__]


def _capturable_here(kind: type[torch.optim.Optimizer]) -> AbstractContextManager[Any]:
    """``capturable=True`` asks for a CUDA device; inside, the CPU of the hollow parameters is one."""
    asked = "_get_capturable_supported_devices"
    module = next((module for module in _modules(kind) if hasattr(module, asked)), None)
    if module is None:
        return nullcontext()
    return patch.object(module, asked, lambda *args, **kwargs: ["cpu", "cuda"])
