"""FSDP2 (``fully_shard``): parameters that are whole only while FSDP has gathered them.

A *unit* is what one ``fully_shard`` call shards together: an ``FSDPParamGroup``. FSDP gathers it before its modules run
forward and again before they run backward, and frees it after each, all in its own hooks. What runs in those hooks is
no part of the step: the tape must not take it for ops of the model, and no replay may trigger it.

A recipe that reads a gathered parameter can run only while that parameter is whole. Two rules ensure that:

- By plan: what is made in a unit's call and read outside it is saved, so replays for one unit never reach into another
  (``recording``).
- By guard: a parameter that FSDP frees counts as changed until it is gathered again from the very shard that it was
  made of. A replay, or an unpack, at the wrong moment is then a named error (``observer``).
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
# What a parameter has accumulated and not reduced; from PyTorch 2.15 on that is the gathered parameter's ``grad``.
_ACCUMULATED = "unsharded_accumulated_grad"
# What a unit has not reduced, and what it is when there is nothing; the last two from PyTorch 2.15 on.
_PENDING: dict[str, Any] = {
    "_partial_reduce_output": None,
    "_partial_reduce_output_layout": {},
    "_post_backward_pending": False,
}


def states_of(model: nn.Module) -> list[tuple[str, Any]]:
    """(path, FSDP state) of each sharded module."""
    known = sys.modules.get(_STATE)
    if known is None:  # nothing can have been sharded; importing it would take longer than asking
        return []
    found = ((path, known._get_module_fsdp_state(m)) for path, m in model.named_modules())
    return [(path, state) for path, state in found if state is not None]


def units_of(model: nn.Module) -> list[Any]:
    """Every ``FSDPParamGroup`` of the model."""
    return list({id(u): u for _, state in states_of(model) for u in state._fsdp_param_groups}.values())


def why_not_supported(model: nn.Module) -> str:
    """What of the model's sharding is not carried out; "" if all is."""
    for unit in units_of(model):
        where = ", ".join(sorted({p._param_fqn or p._module_info.param_name for p in unit.fsdp_params})[:3])
        if any(p.offload_to_cpu and p.device.type != "cpu" for p in unit.fsdp_params):
            return f"FSDP keeps {where} in CPU memory (CPUOffloadPolicy)"
        if any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in unit.fsdp_params):
            return f"FSDP gathers {where} in a form of its own (fsdp_pre_all_gather)"
    return ""


def whole_tensors(unit: Any) -> list[torch.Tensor]:
    """What FSDP gathers into: flat, empty while the unit is sharded. Parameters are views of them."""
    return [t for p in unit.fsdp_params for t in p.all_gather_outputs]


def gather_each_once(model: nn.Module) -> None:
    """Leave every unit sharded and gathered at least once: the tensors that it gathers into then exist.

    A collective: every rank has to call it.
    """
    for unit in units_of(model):
        if not all(map(was_gathered, unit.fsdp_params)):
            unit.lazy_init()
            unit.unshard()
            unit.wait_for_unshard()
        unit.reshard()


def is_gathered_once(model: nn.Module) -> bool:
    """The tensors that every unit gathers into exist."""
    return all(was_gathered(param) for unit in units_of(model) for param in unit.fsdp_params)


@contextmanager
def preserve_fsdp_state(model: nn.Module) -> Iterator[None]:
    """Inside, a step may run or fail; afterwards FSDP waits for the next one, with the gradients it had not reduced."""
    units = units_of(model)
    params = [p for unit in units for p in unit.fsdp_params if was_gathered(p)]
    pending: list[tuple[Any, str, Any]] = [(p._unsharded_param, "grad", None) for p in params]
    pending += [(p, _ACCUMULATED, None) for p in params if _ACCUMULATED in vars(p)]
    pending += [(unit, name, empty) for unit in units for name, empty in _PENDING.items() if name in vars(unit)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in pending]
    for owner, name, empty in pending:
        setattr(owner, name, copy.copy(empty))
    try:
        yield
    except BaseException:
        for _, state in states_of(model):
            if state._is_root:
                state._reset_iter_state()
        raise
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def was_gathered(param: Any) -> bool:
    return hasattr(param, "_unsharded_param")
