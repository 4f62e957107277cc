"""Bytes that an optimizer keeps between steps and needs during one: counted, or foreseen before they are there.

What is to come is counted while the optimizer's own ``step()`` runs on parameters without memory, of the real shapes
(``hollow/optimizer.py``). An optimizer that cannot run so is said to be unknown until its first step has been made.

State is what lies where the parameters are: an optimizer that keeps it in host memory keeps none here.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowtide.device.block_size import in_blocks
from lowtide.device.names import is_accelerator
from lowtide.errors import LowtideError
from lowtide.hollow.optimizer import (
    hollow_optimizer_bytes,
    hollow_step_bytes,
    kernels_on,
    optimizers_inside,
    parts_of,
)
from lowtide.step import optimizer_steps
from lowtide.step.operators import tensors_in
from lowtide.step.optimizer_group import OptimizerGroup

NAMED: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adafactor": (torch.optim.Adafactor, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw_for_loop": (torch.optim.AdamW, {"foreach": False}),
    "adamw_fused": (torch.optim.AdamW, {"fused": True}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "sgd": (torch.optim.SGD, {}),
    "sgd_momentum": (torch.optim.SGD, {"momentum": 0.9}),
}
_MOST_NESTED = 6  # containers and objects in one another
_NO_STATE = frozenset({"state", "param_groups", "defaults"})  # attributes that are looked at by themselves, or not
_PLAIN = (int, float, str, bytes, type(None), type, torch.dtype, torch.device, torch.Generator, nn.Module)
# What rehearsals have found in this process, by optimizer: a rehearsal takes as long as a step's Python, and every
# watched step asks.
_OF_OPTIMIZER: weakref.WeakKeyDictionary[Any, dict[tuple, tuple[int, int] | str]] = weakref.WeakKeyDictionary()
_OF_NAME: dict[tuple, tuple[int, int]] = {}


class UnknownStateError(LowtideError):
    """What an optimizer will keep cannot be said before its first step."""


def optimizer_bytes(optimizer: Any, parameters: list[nn.Parameter]) -> tuple[int, int]:
    """(state, temporaries of one ``step()``) in bytes for ``parameters``, which have gradients.

    State that exists is counted; to that comes what parameters will have that have none yet.

    Raises:
        UnknownStateError: ``step()`` cannot be rehearsed, and no state is there. TypeError, ValueError: see
            ``checked_optimizer``.
    """
    optimizer = checked_optimizer(optimizer)
    if optimizer is None or not parameters:  # backward may have freed the gradients: what is there counts
        return existing_state_bytes(optimizer), 0
    device = parameters[0].device
    kernels, block = kernels_on(device), in_blocks(1, device.type)
    if isinstance(optimizer, str):
        return _foreseen_of_name(optimizer, parameters, kernels, block)
    trained = _trained(optimizer, parameters)
    existing = existing_state_bytes(optimizer, device)
    has_state = {id(p) for p, kept in optimizer.state.items() if next(_tensors_of(kept), None) is not None}
    if not has_state:
        return _foreseen(optimizer, trained, kernels, block)
    if _keeps_growing(optimizer):
        state, step = _foreseen(optimizer, trained, kernels, block)
        return max(existing, state), step
    to_come, step = 0, _foreseen_or_nothing(optimizer, trained, kernels, block)[1]
    if missing := trained - has_state:
        to_come, _ = _foreseen_or_nothing(optimizer, missing, kernels, block)
    return existing + to_come, step


def bytes_without_memory(
    optimizer: Any, parameters: list[nn.Parameter], *, kernels: str, block_bytes: int
) -> tuple[int, int]:
    """``optimizer_bytes`` for ``parameters`` that have no memory, on another device's ``kernels``."""
    optimizer = checked_optimizer(optimizer)
    if optimizer is None or not parameters:
        return 0, 0
    if isinstance(optimizer, str):
        return _foreseen_of_name(optimizer, parameters, kernels, block_bytes)
    # On a CPU state that exists has the CPU's blocks, and numbers on the host that a device's kernels have there.
    is_there = kernels == "cpu" or any(is_accelerator(p.device) for p in _own(optimizer))
    existing = existing_state_bytes(optimizer) if is_there else 0
    if existing:
        return existing, _foreseen_or_nothing(optimizer, _trained(optimizer, parameters), kernels, block_bytes)[1]
    return _foreseen(optimizer, _trained(optimizer, parameters), kernels, block_bytes)


def _own(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _trained(optimizer: Any, parameters: list[nn.Parameter]) -> set[int]:
    """Ids of the optimizer's parameters that will have state where ``parameters`` are."""
    own, trained = _own(optimizer), {id(p) for p in parameters}
    if trained.isdisjoint(map(id, own)):  # it has copies of its own: sharded, or in another precision
        trained = set(map(id, own))
    on_device = is_accelerator(parameters[0].device)
    return {id(p) for p in own if id(p) in trained and (is_accelerator(p.device) or not on_device)}


def existing_state_bytes(optimizer: Any, device: torch.device | None = None) -> int:
    """What the state takes that an optimizer has now on ``device``; of a name nothing.

    Args:
        device: None: that of the optimizer's first parameter.
    """
    optimizer = checked_optimizer(optimizer)
    if optimizer is None or isinstance(optimizer, str):
        return 0
    kept = list(state_tensors(optimizer))
    if not kept:
        return 0
    own = _own(optimizer)
    if device is None:
        device = own[0].device if own else torch.device("cpu")
    not_state = {_address(t) for p in own for held in (p, p.grad) if held is not None for t in _tensors_of(held)}
    found: dict[int, int] = {}
    for tensor in kept:
        is_counted = tensor.dim() > 0 or is_accelerator(device)  # on a CPU numbers take four bytes each
        if tensor.device.type == device.type and is_counted and (key := _address(tensor)) not in not_state:
            found[key] = tensor.untyped_storage().nbytes()
    return sum(in_blocks(size, device.type) for size in found.values())


def lasting_state_bytes(optimizer: Any, device: torch.device | None = None) -> int:
    """``existing_state_bytes``; of an optimizer that adds to its state for many steps, what it will come to."""
    optimizer = checked_optimizer(optimizer)
    existing = existing_state_bytes(optimizer, device)
    if not existing or not _keeps_growing(optimizer):
        return existing
    return max(existing, optimizer_bytes(optimizer, [p for p in _own(optimizer) if p.requires_grad])[0])


def _keeps_growing(optimizer: Any) -> bool:
    """L-BFGS's history does. A plan for what is there after the first step would be too large a few steps later."""
    members = optimizer.optimizers if isinstance(optimizer, OptimizerGroup) else (optimizer,)
    return any(isinstance(member, torch.optim.LBFGS) for member in members)


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """The plain tensors of an optimizer's state, wrappers and objects (GaLore's projectors) are opened.

    Those too that it keeps in attributes of its own, in lists or by themselves.
    """
    state = getattr(optimizer, "state", None)
    for kept in list(state.values()) if isinstance(state, dict) else ():
        yield from _tensors_of(kept)
    for each in optimizer.optimizers if isinstance(optimizer, OptimizerGroup) else (optimizer,):
        for name, value in list(getattr(each, "__dict__", {}).items()):
            if name not in _NO_STATE:
                yield from _tensors_of([t for t in tensors_in(value) if not isinstance(t, nn.Parameter)])


def _tensors_of(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield from (t for t in parts_of(value) if t.layout == torch.strided)
    elif depth == _MOST_NESTED or isinstance(value, _PLAIN) or callable(value):
        return
    elif isinstance(value, dict):
        for item in list(value.values()):
            yield from _tensors_of(item, depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _tensors_of(item, depth + 1)
    elif hasattr(value, "__dict__"):
        yield from _tensors_of(vars(value), depth + 1)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def checked_optimizer(optimizer: Any) -> Any:
    """The optimizer that keeps the state: what Accelerate and DeepSpeed wrap has it as ``.optimizer``.

    A list of them, or a dictionary by whatever, comes back as one.

    Raises:
        TypeError: neither an ``Optimizer`` nor a name. ValueError: the name is unknown.
    """
    if isinstance(optimizer, (list, tuple, dict)):
        several = list(optimizer.values() if isinstance(optimizer, dict) else optimizer)
        if names := [item for item in several if item is None or isinstance(item, str)]:
            raise TypeError(f"optimizer has {names[0]!r} among {len(several)}. Pass optimizers, or one name.")
        return OptimizerGroup(map(checked_optimizer, several))
    while hasattr(inner := getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = inner
    if isinstance(optimizer, str) and optimizer.lower() not in NAMED:
        raise ValueError(f"optimizer={optimizer!r} is not one of {', '.join(NAMED)}. Pass the optimizer itself.")
    keeps_state = hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")
    if optimizer is not None and not isinstance(optimizer, str) and not keeps_state:
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}. Pass a torch.optim.Optimizer, several, or a name like 'adamw'."
        )
    return optimizer


def _foreseen_of_name(name: str, parameters: list[nn.Parameter], kernels: str, block: int) -> tuple[int, int]:
    parts: list[Any] = [t for p in parameters for t in parts_of(p.detach())]
    key = (name.lower(), tuple((tuple(t.shape), t.dtype) for t in parts), kernels, block)
    if key not in _OF_NAME:
        kind, settings = NAMED[name.lower()]
        _OF_NAME[key] = hollow_optimizer_bytes(kind, settings, parts, kernels=kernels, block_bytes=block)
    return _OF_NAME[key]


def _foreseen(optimizer: Any, trained: set[int], kernels: str, block: int) -> tuple[int, int]:
    """``hollow_step_bytes``, rehearsed once for settings that bytes may depend on. Raises: UnknownStateError."""
    if not trained:
        return 0, 0
    if isinstance(optimizer, OptimizerGroup):  # they step one after the other
        # What one steps that is among them is foreseen where that stands.
        several = [o for o in optimizer.optimizers if not optimizers_inside(o)] or optimizer.optimizers
        each = [_foreseen(o, trained & set(map(id, _own(o))), kernels, block) for o in several]
        return sum(state for state, _ in each), max(step for _, step in each)
    groups = tuple(
        (
            tuple((name, _kept(value)) for name, value in sorted(group.items()) if name != "params"),
            tuple((tuple(p.shape), p.dtype, id(p) in trained) for p in group["params"]),
        )
        for group in optimizer.param_groups
    )
    settings = tuple((name, _kept(value)) for name, value in sorted(vars(optimizer).items()) if name[0] != "_")
    key = groups, settings, kernels, block
    # Of PyTorch's own, all of a kind are alike.
    of = type(optimizer) if type(optimizer).__module__.startswith("torch.optim.") else optimizer
    known = _OF_OPTIMIZER.setdefault(of, {})
    if key not in known:
        try:
            known[key] = hollow_step_bytes(
                optimizer, trained, kernels=kernels, block_bytes=block, beside=optimizer_steps.seen()
            )
        except Exception as error:  # another library's code, on tensors that it was not made for
            known[key] = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(found := known[key], str):
        raise UnknownStateError(
            f"what {type(optimizer).__name__} keeps is not known before its first step, which could not be rehearsed "
            f"({found}): nothing is counted for it until it is there."
        )
    return found


def _foreseen_or_nothing(optimizer: Any, trained: set[int], kernels: str, block: int) -> tuple[int, int]:
    try:
        return _foreseen(optimizer, trained, kernels, block)
    except UnknownStateError:  # what is there is counted
        return 0, 0


def _kept(value: Any) -> Any:
    """What bytes may depend on: learning rates and their like change from step to step, and count as zero or not."""
    if isinstance(value, float):
        return value != 0.0
    if isinstance(value, (tuple, list)):
        return tuple(map(_kept, value))
    return value if isinstance(value, (int, str, type(None))) else type(value)
