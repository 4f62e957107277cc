"""Bytes that an optimizer keeps between steps and needs during one, before its first step has made them."""

import inspect
from typing import Any

import torch

from lowtide.device.block_size import in_blocks
from lowtide.device.names import is_accelerator
from lowtide.hollow.optimizer import hollow_optimizer_bytes
from lowtide.measurement.allocator import peak_bytes
from lowtide.tracing.operators import tensors_in
from lowtide.tracing.subclasses import plain_tensors

_BY_NAME: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop,
}  # fmt: skip
_PROBED: dict[tuple, tuple[list[float], int, float]] = {}  # what probes have found in this process
_SIDE = 64  # of the probe's square parameter: large beside per-parameter scalars such as Adam's step


def optimizer_bytes(optimizer: Any, parameters: list[torch.nn.Parameter]) -> tuple[int, int]:
    """(state, temporaries of one ``step()``) in bytes for ``parameters``.

    State that exists is counted; state still to come is read off one step of a small optimizer of the same class
    and settings, as bytes per parameter element, and scalars on the device as a block each.

    Raises:
        TypeError: neither an ``Optimizer`` nor a known name.
    """
    found = _kind_and_settings(optimizer)
    if found is None:
        return 0, 0
    kind, settings = found
    sizes = [sum(t.numel() for t in plain_tensors(p)) for p in parameters]
    like = parameters[0] if parameters else torch.zeros(1)
    states, scalars, one = _probe(kind, settings, like, 1)
    _, _, two = _probe(kind, settings, like, 2)
    together = two > 1.5 * one  # foreach and fused kernels hold temporaries of all parameters, a loop those of one
    state = existing_state_bytes(optimizer)
    if not state:
        to_come = [round(each * size) for each in states for size in sizes]
        in_blocks_more = sum(in_blocks(size, like.device.type) - size for size in to_come)
        state = round(sum(states) * sum(sizes)) + in_blocks_more
        state += scalars * len(sizes) * in_blocks(1, like.device.type)
    return state, round(one * (sum(sizes) if together else max(sizes, default=0)))


def bytes_without_memory(
    optimizer: Any, parameters: list[torch.nn.Parameter], *, kernels: str, block_bytes: int
) -> tuple[int, int]:
    """``optimizer_bytes``, by running the optimizer on hollow parameters of the very sizes."""
    found = _kind_and_settings(optimizer)
    if found is None:
        return 0, 0
    state, step = hollow_optimizer_bytes(*found, parameters, kernels=kernels, block_bytes=block_bytes)
    if kernels != "cpu" and not _is_on_accelerator(optimizer):
        return state, step  # state that exists has the CPU's blocks, and scalars that would be on the device
    return existing_state_bytes(optimizer) or state, step


def _is_on_accelerator(optimizer: Any) -> bool:
    keys = getattr(checked_optimizer(optimizer), "state", ())
    return any(isinstance(p, torch.Tensor) and is_accelerator(p.device) for p in keys)


def _kind_and_settings(optimizer: Any) -> tuple[type, dict[str, Any]] | None:
    """Raises: as ``checked_optimizer``."""
    optimizer = checked_optimizer(optimizer)
    if optimizer is None:
        return None
    if isinstance(optimizer, str):
        return _BY_NAME[optimizer.lower()], {}
    return type(optimizer), {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}


def existing_state_bytes(optimizer: Any) -> int:
    """What the state takes that an optimizer has now; of a name nothing."""
    optimizer = checked_optimizer(optimizer)
    if optimizer is None or isinstance(optimizer, str):
        return 0
    return sum(
        in_blocks(t.nbytes, t.device.type)
        for p, s in optimizer.state.items()
        for t in [*_state_tensors(s), *_scalars(p, s)]
    )


def checked_optimizer(optimizer: Any) -> Any:
    """The optimizer that keeps the state: what Accelerate and DeepSpeed wrap has it as ``.optimizer``.

    Raises:
        TypeError: neither an ``Optimizer`` nor a name. ValueError: the name is unknown.
    """
    while hasattr(inner := getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = inner
    if isinstance(optimizer, str) and optimizer.lower() not in _BY_NAME:
        raise ValueError(f"optimizer={optimizer!r} is not one of {sorted(_BY_NAME)}. Pass the optimizer itself.")
    keeps_state = hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")
    if optimizer is not None and not isinstance(optimizer, str) and not keeps_state:
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}. Pass a torch.optim.Optimizer, or a name like 'adamw'."
        )
    return optimizer


def _probe(kind: type, settings: dict, like: torch.Tensor, count: int) -> tuple[list[float], int, float]:
    """(each state tensor of one, its scalars on the device, step temporaries) of ``count`` small parameters.

    Tensors and temporaries in bytes per element of one parameter.

    Measured once: a probe takes 0.2 s, and every watched step asks.
    """
    key = (kind, *((name, _kept(value)) for name, value in sorted(settings.items())), like.dtype, like.device, count)
    if key not in _PROBED:
        _PROBED[key] = _measured(kind, settings, like, count)
    return _PROBED[key]


def _kept(value: Any) -> Any:
    """What bytes may depend on: learning rates and their like change from step to step, and count as zero or not."""
    if isinstance(value, float):
        return value != 0.0
    if isinstance(value, (tuple, list)):
        return tuple(map(_kept, value))
    return value if isinstance(value, (int, str, type(None))) else type(value)


def _measured(kind: type, settings: dict, like: torch.Tensor, count: int) -> tuple[list[float], int, float]:
    probes = [torch.nn.Parameter(torch.zeros(_SIDE, _SIDE, dtype=like.dtype, device=like.device)) for _ in range(count)]
    known = {k: v for k, v in settings.items() if k in inspect.signature(kind).parameters}
    small = kind(probes, **known)
    for probe in probes:
        probe.grad = torch.zeros_like(probe)
    small.step()
    state = small.state[probes[0]]
    states = [t.nbytes / probes[0].numel() for t in _state_tensors(state)]
    temporaries = peak_bytes(small.step, like.device)
    return states, len(_scalars(probes[0], state)), temporaries / probes[0].numel()


def _state_tensors(state: dict) -> list[torch.Tensor]:
    """Not the scalars, such as Adam's step."""
    return list(plain_tensors(*(t for t in tensors_in(state) if t.numel() > 1)))


def _scalars(parameter: Any, state: dict) -> list[torch.Tensor]:
    """Those on an accelerator, where fused and capturable kernels read them; others are on the CPU."""
    if not isinstance(parameter, torch.Tensor) or not is_accelerator(parameter.device):
        return []
    return [t for t in plain_tensors(*tensors_in(state)) if t.numel() == 1 and t.device.type == parameter.device.type]
