"""Milliseconds of a value of a joint graph: calls of ready kernels are timed, all else goes by its bytes.

Where kernels do nothing (``device/values_off.py``), both are those of a device of the table.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.compiled.generated_code import BufferSpec, Prices
from lowtide.compiled.joint_nodes import SLOW_ELEMENTWISE
from lowtide.compiled.sizes import FIXED, Sizes
from lowtide.device import values_off
from lowtide.device.generators import forked
from lowtide.device.kept_workspaces import KeptWorkspaces
from lowtide.device.names import is_accelerator
from lowtide.device.timing import calls_ms
from lowtide.estimation.device_table import device_named
from lowtide.estimation.roofline import call_ms, moved_ms
from lowtide.measurement.allocator import measuring
from lowtide.measurement.op_inputs import describe

LAUNCH_MS = 0.005
SLOW_ELEMENT_MS = 1e-6  # a transcendental function, one element, on a CPU
_SAMPLES = 3
_COPIED_BYTES = 1 << 24

_ms: dict[object, float] = {}
_workspaces: dict[object, int] = {}
KEPT_WORKSPACES = KeptWorkspaces()


def extern_ms(node: fx.Node, device: torch.device, sizes: Sizes = FIXED) -> float:
    """Time of one call of the operator of ``node`` on synthetic tensors; by its bytes where it does not run on them."""
    args, kwargs = _specs((node.args, node.kwargs), sizes)
    made_bytes = sum(spec.bytes for spec in _all_specs(_specs((node,), sizes)))
    return _operator_ms(node.target, args, kwargs, made_bytes, device)


def _operator_ms(target: Any, args: Any, kwargs: Any, made_bytes: int, device: torch.device) -> float:
    if values_off.times_of:
        meta = torch.device("meta")
        call = describe(target, _tensors(args, meta), _tensors(kwargs, meta))
        return call_ms(call, made_bytes, device_named(values_off.times_of))
    key = device.type, str(target), repr(args), repr(kwargs)
    if key not in _ms:
        try:
            with _disable_current_modes(), torch.no_grad(), forked(device):  # some draw: training's numbers stay
                real_args, real_kwargs = _tensors(args, device), _tensors(kwargs, device)
                target(*real_args, **real_kwargs)
                _ms[key] = _least_ms(lambda: target(*real_args, **real_kwargs), device)
        except (RuntimeError, TypeError, NotImplementedError):
            moved = sum(spec.bytes for spec in _all_specs((args, kwargs)))
            _ms[key] = bytes_ms(2 * moved, device)
    return _ms[key]


def fused_ms(
    node: fx.Node, moved_bytes: int, fused: Sequence[fx.Node], device: torch.device, sizes: Sizes = FIXED
) -> float:
    """Time of a kernel that reads and writes ``moved_bytes`` and computes ``fused`` on the way."""
    slow = sum(str(n.target).split(".")[1:2] in ([name] for name in SLOW_ELEMENTWISE) for n in [node, *fused])
    value = node.meta.get("val")
    elements = sizes.of(value.numel()) if isinstance(value, torch.Tensor) else 0
    slow_ms = 0.0 if is_accelerator(device) else SLOW_ELEMENT_MS * elements * slow  # there it hides behind the bytes
    return LAUNCH_MS + bytes_ms(moved_bytes, device) + slow_ms


def prices(device: torch.device) -> Prices | None:
    """Of what generated code runs on ``device``; None on a CPU, where bytes alone say too little of a kernel's time."""
    if not is_accelerator(device):
        return None

    def called_ms(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made_bytes: int) -> float:
        others = {name: _specs_of_stand_ins(value) for name, value in kwargs.items() if name != "out"}
        return _operator_ms(_operator(target), _specs_of_stand_ins(args), others, made_bytes, device)

    return Prices(lambda moved_bytes: LAUNCH_MS + bytes_ms(moved_bytes, device), called_ms)


def _operator(target: Any) -> Any:
    """The operator that a kernel of Inductor's is, as graphs name it."""
    if isinstance(target, torch._ops.OpOverload):
        return target
    packet = getattr(torch.ops.aten, str(getattr(target, "__name__", "")).removeprefix("bias_"), target)
    return getattr(packet, "default", target)


def bytes_ms(count: int, device: torch.device) -> float:
    if values_off.times_of:
        return moved_ms(count, device_named(values_off.times_of))
    return count / _bytes_per_ms(device)


def measure_copies(device: torch.device) -> None:
    """Measure now how fast ``device`` copies, which takes 32 MiB: before a step, whose memory is the budget's."""
    if device.type != "meta" and not values_off.times_of:
        _bytes_per_ms(device)


@cache
def _bytes_per_ms(device: torch.device) -> float:
    with _disable_current_modes():
        source = torch.ones(_COPIED_BYTES // 4, device=device)
        into = torch.empty_like(source)
        return 2 * _COPIED_BYTES / max(_least_ms(lambda: into.copy_(source), device), 1e-3)


def _least_ms(call: Callable[[], Any], device: torch.device) -> float:
    return min(calls_ms(call, 1, device, time.process_time) for _ in range(_SAMPLES))


def workspace_bytes(target: Any, args: Sequence[Any], kwargs: Any, *, device: torch.device) -> int:
    """What a kernel allocates for a moment beyond its results, measured once on synthetic tensors."""
    specs = tuple(_specs_of_stand_ins(a) for a in args), {k: _specs_of_stand_ins(v) for k, v in kwargs.items()}
    key = device.type, str(target), repr(specs)
    if key not in _workspaces:
        _workspaces[key] = 0
        KEPT_WORKSPACES.take(device)
        try:
            with _disable_current_modes(), torch.no_grad():
                real_args, real_kwargs = _tensors(specs[0], device), _tensors(specs[1], device)
                with forked(device), measuring(device) as counter:
                    made = target(*real_args, **real_kwargs)
                if counter is not None:
                    _workspaces[key] = counter.workspace
                del made
        except (RuntimeError, TypeError, NotImplementedError):
            pass
    return _workspaces[key]


def _specs(value: Any, sizes: Sizes) -> Any:
    """Arguments of a node with each node replaced by what it looks like."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        return BufferSpec.of(value, sizes)
    if isinstance(value, torch.SymInt):
        return sizes.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(_specs(v, sizes) for v in value)
    if isinstance(value, dict):
        return {name: _specs(v, sizes) for name, v in value.items()}
    return value


def _specs_of_stand_ins(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_specs_of_stand_ins, value))
    return getattr(value, "spec", value)


def _tensors(value: Any, device: torch.device) -> Any:
    if isinstance(value, BufferSpec):
        tensor = torch.empty(value.bytes // value.dtype.itemsize, dtype=value.dtype, device=device)
        tensor.fill_(0.5 if value.dtype.is_floating_point else 0)
        return tensor.as_strided(value.size, value.stride)
    if isinstance(value, (list, tuple)):
        return tuple(_tensors(v, device) for v in value)
    if isinstance(value, dict):
        return {name: _tensors(v, device) for name, v in value.items()}
    return value


def _all_specs(value: Any) -> list[BufferSpec]:
    if isinstance(value, BufferSpec):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [spec for part in value for spec in _all_specs(part)] if isinstance(value, tuple) else []
