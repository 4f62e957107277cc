"""Which addresses are weights, gradients and optimizer states, noted around each step."""

import contextlib
import gc
import time
from types import ModuleType
from typing import Any

Addresses = dict[int, str]
noted: list[tuple[int, Addresses]] = []  # microseconds of the clock that the allocator's history has
step_ends: list[int] = []  # by the same clock
_modules: list[Any] = []
_optimizers: list[Any] = []


def note(torch: ModuleType) -> None:
    """Look at every module and every optimizer of the process."""
    _find(torch)
    found: Addresses = {}
    for module in _modules:
        for buffer in module.__dict__.get("_buffers", {}).values():
            found[_address(buffer)] = "weights"
        for parameter in module.__dict__.get("_parameters", {}).values():
            _parameter(parameter, found)
    for optimizer in _optimizers:
        for group in optimizer.__dict__.get("param_groups", ()):
            for parameter in group["params"]:
                _parameter(parameter, found)
        states = optimizer.__dict__.get("state", {})
        for state in states.values() if hasattr(states, "values") else ():
            for value in state.values() if isinstance(state, dict) else ():
                _tensors(torch, value, "optimizer", found)
    found.pop(0, None)
    noted.append((time.time_ns() // 1000, found))


def modules(torch: ModuleType) -> list[Any]:
    """Every module of the process."""
    _find(torch)
    return list(_modules)


def _find(torch: ModuleType) -> None:
    """Modules that came since, too: a wrapper makes new ones, and so does an evaluation."""
    _modules.clear()
    _optimizers.clear()
    for thing in gc.get_objects():
        kinds = type(thing).__mro__
        if torch.nn.Module in kinds:
            _modules.append(thing)
        elif torch.optim.Optimizer in kinds:
            _optimizers.append(thing)


def _parameter(parameter: Any, found: Addresses) -> None:
    if parameter is None:
        return
    found.setdefault(_address(parameter), "weights")
    with contextlib.suppress(Exception):  # a parameter that is none: a property that raises
        for name in ("grad", "main_grad"):
            found[_address(getattr(parameter, name, None))] = "gradients"
        found.setdefault(_address(getattr(parameter, "ds_tensor", None)), "weights")  # ZeRO-3: this rank's share
    scales = getattr(parameter, "quant_state", None)  # bitsandbytes
    for value in vars(scales).values() if hasattr(scales, "__dict__") else ():
        found.setdefault(_address(value), "weights")


def _tensors(torch: ModuleType, value: Any, kind: str, found: Addresses) -> None:
    if isinstance(value, torch.Tensor):
        found[_address(value)] = kind
    elif isinstance(value, (list, tuple)):
        for item in value:
            _tensors(torch, item, kind, found)


def _address(tensor: Any) -> int:
    tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor
    try:
        return tensor.untyped_storage().data_ptr() if tensor is not None and tensor.device.type == "cuda" else 0
    except Exception:  # no tensor, or one without memory
        return 0
