"""Op signatures: an operator call as JSON, and the same call rebuilt with synthetic tensors, to be timed.

A signature is ``{"op": "aten.mm.default", "args": [...], "kwargs": {...}}``. Numbers, text, booleans and None are
themselves; everything else is an object with one key that says what it is:

    {"t": [2, 3], "stride": [3, 1], "dtype": "float32", "device": "cpu"}   a tensor, by layout; no values
    {"l": [...]}  {"d": {...}}                                            a list or tuple; a dict
    {"dtype": "float32"}  {"device": "cpu"}  {"layout": "strided"}  {"memory_format": "channels_last"}
    {"inf": "inf" | "-inf" | "nan"}  {"complex": [re, im]}
    {"generator": true}                                                   the default generator is used instead
    {"opaque": "torch.ScriptObject"}                                      cannot be rebuilt

A device has no index, so a model on two equal devices has each signature once.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from lowtide.errors import LowtideError

# Namespaces of operators that communicate: run alone, they would wait for other ranks.
COLLECTIVES = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "symm_mem"}
)
_BLOCK = 1 << 14  # a float tensor larger than this repeats one block of numbers
_GOLDEN_RATIO = (1 + math.sqrt(5)) / 2
_PLAIN = frozenset({int, str, bool, type(None)})


class OpCall(NamedTuple):
    """An operator and its arguments."""

    func: torch._ops.OpOverload
    args: list[Any]
    kwargs: dict[str, Any]


class NotRebuildableError(LowtideError):
    """A signature that holds an opaque argument, or an operator that cannot run alone."""


class CollectiveError(NotRebuildableError):
    """The operator communicates with other ranks; it is never replayed."""


def describe(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the signature of one operator call. Never fails: an unknown argument becomes ``opaque``."""
    return {
        "op": str(func),
        "args": [_describe(a) for a in args],
        "kwargs": {k: _describe(v) for k, v in kwargs.items()},
    }


def rebuild(signature: Mapping[str, Any], device: str | torch.device) -> OpCall:
    """Return the operator and synthetic arguments of the shapes and strides in ``signature``.

    Floats lie between 3/4 and 1, in no order: operators on probabilities take them, and when an op is repeated in place
    its products stay away from denormal numbers, which are slow. Integers are 0 (an index that is valid everywhere),
    booleans True. Tensors that were on the CPU stay there; all others go to ``device``.

    Raises:
        NotRebuildableError: the operator is unknown here, a collective, or an argument is opaque.
    """
    name = signature["op"]
    if name.partition(".")[0] in COLLECTIVES:
        raise CollectiveError(f"{name} is a collective: alone it would wait for its peers.")
    func = operator_named(name)
    if func is None:
        raise NotRebuildableError(f"{name} is not an operator of this torch {torch.__version__}.")
    if not isinstance(func, torch._ops.OpOverload):
        raise NotRebuildableError(f"{name} is not a single operator: it cannot be run from JSON.")
    target = torch.device(device)
    args = [_rebuilt(a, target) for a in signature.get("args", ())]
    return OpCall(func, args, {k: _rebuilt(v, target) for k, v in signature.get("kwargs", {}).items()})


def operator_named(name: str) -> Any:
    """``"aten.mm.default"`` as the operator object; None if this build of PyTorch has none of that name."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, RuntimeError):
        return None


def tensor_bytes(signature: Mapping[str, Any]) -> int:
    """Return the bytes of memory that the tensors in ``signature`` span: what ``rebuild`` allocates."""
    return sum(span(t["t"], t["stride"]) * _dtype(t["dtype"]).itemsize for t in described_tensors(dict(signature)))


def _describe(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"inf": str(value)}
    if isinstance(value, (list, tuple)):  # torch.Size is a tuple
        return {"l": [_describe(v) for v in value]}
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        return {kind.__name__: _name(value)}
    if kind is torch.device:
        return {"device": value.type}
    if kind is complex:
        return {"complex": [_describe(value.real), _describe(value.imag)]}
    if isinstance(value, torch.Generator):
        return {"generator": True}
    if isinstance(value, Mapping):
        return {"d": {str(k): _describe(v) for k, v in value.items()}}
    return _opaque(value)


def _describe_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return _opaque(tensor)
    return {
        "t": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": _name(tensor.dtype),
        "device": tensor.device.type,
    }


def _opaque(value: Any) -> dict[str, Any]:
    # The type only: a repr may hold an address, which would make every call distinct.
    return {"opaque": f"{type(value).__module__}.{type(value).__qualname__}"}


@cache
def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise NotRebuildableError(f"dtype {name!r} is unknown to this torch {torch.__version__}.")
    return dtype


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor, gaps included."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride))


def described_tensors(value: Any) -> list[dict[str, Any]]:
    """Those in a signature, or in a part of one."""
    if isinstance(value, dict):
        return [value] if "t" in value else [t for v in value.values() for t in described_tensors(v)]
    return [t for v in value for t in described_tensors(v)] if isinstance(value, list) else []


def _rebuilt(described: Any, target: torch.device) -> Any:
    """An argument as ``_describe`` described it, on ``target`` unless it was on the CPU."""
    if not isinstance(described, dict):
        return described
    if "t" in described:
        return _tensor(described, _device(described["device"], target))
    (key, content), *others = described.items()
    if others:
        raise NotRebuildableError(f"{described!r} is not a described argument.")
    match key:
        case "l":
            return [_rebuilt(v, target) for v in content]
        case "d":
            return {k: _rebuilt(v, target) for k, v in content.items()}
        case "dtype":
            return _dtype(content)
        case "layout" | "memory_format":
            return getattr(torch, content)
        case "device":
            return _device(content, target)
        case "inf":
            return float(content)
        case "complex":
            return complex(*(_rebuilt(v, target) for v in content))
        case "generator":
            return None
    what = content if key == "opaque" else repr(described)
    raise NotRebuildableError(f"an argument is {what}: no way to make one.")


def _device(kind: str, target: torch.device) -> torch.device:
    return torch.device(kind) if kind in ("cpu", "meta") else target


def _tensor(described: dict[str, Any], device: torch.device) -> torch.Tensor:
    shape, stride, dtype = described["t"], described["stride"], _dtype(described["dtype"])
    count = span(shape, stride)
    if dtype.is_floating_point or dtype.is_complex:
        # Multiples of the golden ratio, less whole numbers, are as scattered as random ones, and no generator moves.
        steps = torch.arange(min(count, _BLOCK), dtype=torch.float64, device=device)
        flat = steps.mul_(_GOLDEN_RATIO).remainder_(1).mul_(0.25).add_(0.75).to(dtype)
        del steps
        if count > _BLOCK:
            flat = flat.repeat(-(-count // _BLOCK))[:count]
    else:
        flat = torch.full((count,), dtype == torch.bool, dtype=dtype, device=device)
    return flat.as_strided(shape, stride)
