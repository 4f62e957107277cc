"""Op signatures: an operator call as JSON, and the same call rebuilt with synthetic tensors, to be timed.

A signature is ``{"op": "aten.mm.default", "args": [...], "kwargs": {...}}``. Numbers, text, booleans and None are
themselves; everything else is an object with one key that says what it is:

    {"t": [2, 3], "stride": [3, 1], "dtype": "float32", "device": "cpu"}   a tensor, by layout; no values
    {"l": [...]}  {"d": {...}}                                            a list or tuple; a dict
    {"dtype": "float32"}  {"device": "cuda"}  {"layout": "strided"}  {"memory_format": "channels_last"}
    {"inf": "inf" | "-inf" | "nan"}  {"complex": [re, im]}  {"slice": [start, stop, step]}
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

# Run alone, these would wait for other ranks.
_COLLECTIVE_NAMESPACES = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor"}
)
_SEED = 0
_NATIVE_RANDOM = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
})  # fmt: skip
# Random numbers are slow to draw; a tensor larger than this repeats one block of them.
_BLOCK = 1 << 18
_PLAIN = frozenset({int, str, bool, type(None)})
_SYMBOLS: dict[type, Any] = {torch.SymInt: int, torch.SymBool: bool, torch.SymFloat: float}


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


def rebuild(signature: Mapping[str, Any], device: str | torch.device, *, positive: bool = False) -> OpCall:
    """Return the operator and synthetic arguments of the shapes and strides in ``signature``.

    Floats are small and random, integers 0 (an index that is valid everywhere), booleans True. Tensors that were on
    the CPU stay there; all others go to ``device``. The global random state is left alone.

    Args:
        positive: Floats lie between 0 and 1, for operators that take probabilities.

    Raises:
        NotRebuildableError: the operator is unknown here, a collective, or an argument is opaque.
    """
    name = signature["op"]
    if name.partition(".")[0] in _COLLECTIVE_NAMESPACES:
        raise CollectiveError(f"{name} is a collective: alone it would wait for its peers.")
    func = operator_named(name)
    if func is None:
        raise NotRebuildableError(f"{name} is not an operator of this torch {torch.__version__}.")
    if not isinstance(func, torch._ops.OpOverload):
        raise NotRebuildableError(f"{name} is not a single operator: it cannot be run from JSON.")
    make = _Maker(torch.device(device), positive)
    args = [make.value(a) for a in signature.get("args", ())]
    return OpCall(func, args, {k: make.value(v) for k, v in signature.get("kwargs", {}).items()})


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
    return sum(_span(t["t"], t["stride"]) * _dtype(t["dtype"]).itemsize for t in _tensors(dict(signature)))


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
    if kind in _SYMBOLS:
        try:
            return _SYMBOLS[kind](value)
        except Exception:  # a data-dependent size on fake tensors has no number, and its error type varies
            return _opaque(value)
    if kind is complex:
        return {"complex": [_describe(value.real), _describe(value.imag)]}
    if kind is slice:
        return {"slice": [_describe(value.start), _describe(value.stop), _describe(value.step)]}
    if isinstance(value, torch.Generator):
        return {"generator": True}
    if isinstance(value, Mapping):
        return {"d": {str(k): _describe(v) for k, v in value.items()}}
    return _opaque(value)


def _describe_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return _opaque(tensor)
    try:
        return {
            "t": list(map(int, tensor.shape)),
            "stride": list(map(int, tensor.stride())),
            "dtype": _name(tensor.dtype),
            "device": tensor.device.type,
        }
    except Exception:  # as for symbols
        return _opaque(tensor)


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


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride))


def _tensors(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        return [value] if "t" in value else [t for v in value.values() for t in _tensors(v)]
    return [t for v in value for t in _tensors(v)] if isinstance(value, list) else []


class _Maker:
    """Makes the arguments of one call, with a generator of its own."""

    def __init__(self, target: torch.device, positive: bool) -> None:
        self.target, self.positive = target, positive
        self.generators: dict[str, torch.Generator] = {}

    def value(self, described: Any) -> Any:
        if not isinstance(described, dict):
            return described
        if "t" in described:
            return self.tensor(described)
        (key, content), *others = described.items()
        if others:
            raise NotRebuildableError(f"{described!r} is not a described argument.")
        match key:
            case "l":
                return [self.value(v) for v in content]
            case "d":
                return {k: self.value(v) for k, v in content.items()}
            case "dtype":
                return _dtype(content)
            case "layout" | "memory_format":
                return getattr(torch, content)
            case "device":
                return self.device(content)
            case "inf":
                return float(content)
            case "complex":
                return complex(*(self.value(v) for v in content))
            case "slice":
                return slice(*(self.value(v) for v in content))
            case "generator":
                return None
        what = content if key == "opaque" else repr(described)
        raise NotRebuildableError(f"an argument is {what}: no way to make one.")

    def device(self, kind: str) -> torch.device:
        return torch.device(kind) if kind in ("cpu", "meta") else self.target

    def tensor(self, described: dict[str, Any]) -> torch.Tensor:
        shape, stride, dtype = described["t"], described["stride"], _dtype(described["dtype"])
        count, device = _span(shape, stride), self.device(described["device"])
        if dtype.is_floating_point or dtype.is_complex:
            flat = self.random(min(count, _BLOCK), dtype, device)
            if count > _BLOCK:
                flat = flat.repeat(-(-count // _BLOCK))[:count]
        else:
            flat = torch.full((count,), dtype == torch.bool, dtype=dtype, device=device)
        return flat.as_strided(shape, stride)

    def random(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        generator = self.generators.get(device.type)
        if generator is None and device.type != "meta":
            generator = self.generators[device.type] = torch.Generator(device).manual_seed(_SEED)
        drawn = dtype if dtype in _NATIVE_RANDOM else torch.float32
        block = torch.empty(count, dtype=drawn, device=device)
        if self.positive:
            return block.uniform_(0.1, 0.9, generator=generator).to(dtype)
        return block.normal_(std=0.1, generator=generator).to(dtype)
