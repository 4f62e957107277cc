"""Dispatch modes of lowtide's own, what they look through, and work that no mode sees."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey
from torch._C import _dispatch_tls_is_dispatch_key_excluded as key_is_excluded
from torch._C import _dispatch_tls_set_dispatch_key_excluded as exclude_key
from torch.utils._python_dispatch import TorchDispatchMode

_NESTED = "torch.nested."
NOTHING = nullcontext()  # around an op: one object, so that whoever runs ops knows it
_WITHOUT_OTHERS = frozenset({"aten", "prims", "prim", "profiler"})
_NO_TENSORS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})


class UncompiledMode(TorchDispatchMode):
    """A mode under which compiled code runs as ever.

    Attributes:
        may_step_aside: Ops may run without it; see ``step.seam.step_aside``.
    """

    may_step_aside = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper PyTorch puts around a mode otherwise imports the compiler and costs microseconds per op.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else compiled code under the mode silently runs as eager


@cache
def may_run_others(func: Any) -> bool:
    """Whether its kernel may be Python that runs operators itself: it is none of PyTorch's own."""
    return hasattr(func, "_schema") and func.namespace not in _WITHOUT_OTHERS


@contextmanager
def hidden_from_modes() -> Iterator[None]:
    """Inside, what runs is no op for any dispatch mode."""
    before = key_is_excluded(DispatchKey.Python)
    exclude_key(DispatchKey.Python, True)
    try:
        yield
    finally:
        exclude_key(DispatchKey.Python, before)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as a flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in an argument or a result, nested sequences included, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def tensors_of(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """``tensors_in`` what an operator is given or returns, several times as fast."""
    found: list[torch.Tensor] = []
    for argument in arguments:
        kind = type(argument)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            found.append(argument)
        elif kind not in _NO_TENSORS:
            found += tensors_in(argument)
    return found


def is_wrapper_type(kind: type) -> bool:
    """Tensors of this type say which plain ones they wrap: DTensors, quantised weights, results of collectives.

    Nested tensors do too, of sizes that are symbols: no part of theirs stands for the whole.
    """
    says = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    return says and not kind.__module__.startswith(_NESTED)


def is_opened_type(kind: type) -> bool:
    """An op on tensors of this type comes to ops on plain ones, which a mode sees if it declines the op."""
    return is_wrapper_type(kind) or kind.__module__.startswith(_NESTED)
