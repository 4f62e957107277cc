"""What an optimizer keeps and needs, counted while its own ``step()`` runs on hollow parameters."""

import inspect
import sys
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.device.dispatch import tensors_in
from lowtide.hollow.memory import hollow_like


class _Counting(TorchDispatchMode):
    """Live bytes of storages that are made inside."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__()
        self._block_bytes = block_bytes
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs or {}))}
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_in(output):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._known:
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
    if kernels == "cuda" and _prefers_lists(kind) and not chosen.get("fused") and chosen.get("foreach") is None:
        chosen["foreach"] = True
    own = [torch.nn.Parameter(hollow_like(p)) for p in parameters]
    for parameter in own:
        parameter.grad = hollow_like(parameter)
    optimizer = kind(own, **chosen)
    with torch.no_grad():
        with _Counting(block_bytes) as first:
            optimizer.step()
        state_bytes = first.live_bytes
        with _Counting(block_bytes) as later:
            optimizer.step()
    return state_bytes, later.peak_bytes


def _prefers_lists(kind: type[torch.optim.Optimizer]) -> bool:
    """Its module asks which parameters foreach kernels take; Adafactor's does not, to save memory."""
    own = [base for base in kind.__mro__ if base not in torch.optim.Optimizer.__mro__]
    return any(hasattr(sys.modules[base.__module__], "_default_to_fused_or_foreach") for base in own)
