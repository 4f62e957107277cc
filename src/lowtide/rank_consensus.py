"""What ranks that train a model together, replicated or sharded, do together: rehearse, and fail.

Plans need not be equal: a replay runs no collective, so what one rank recomputes no other rank notices. But rehearsals
communicate, and an error on one rank is raised on every rank: otherwise the others would wait in their next collective.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from lowtide.errors import BudgetInfeasibleError, LowtideError
from lowtide.step.data_parallel import ddp_wrapper_of
from lowtide.step.subclasses import wrapped_parameters

T = TypeVar("T")

_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that train ``model`` together; None if there is one only."""
    wrapper = ddp_wrapper_of(model)
    if wrapper is not None:
        return None if dist.get_world_size(wrapper.process_group) == 1 else wrapper.process_group
    meshes = {id(p.device_mesh): p.device_mesh for p in wrapped_parameters(model)}.values()
    ranks = tuple(sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}))
    if len(ranks) < 2:
        return None
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    if ranks not in _groups:  # a pipeline stage that is sharded itself
        _groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _groups[ranks]


def from_all_ranks(group: dist.ProcessGroup | None, mine: Any) -> list[Any]:
    """What each rank passes, by rank; the same answer on all."""
    if group is None:
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def run_on_all_ranks(group: dist.ProcessGroup | None, what: str, run: Callable[[], T]) -> T:
    """``run()`` on every rank.

    Raises:
        BudgetInfeasibleError: no plan fits on another rank. LowtideError: it failed on another rank otherwise. This
            rank's own error is raised as it is.
    """
    if group is None:
        return run()
    error: Exception | None = None
    try:
        result = run()
    except Exception as caught:
        error = caught
    told = error if error is None or isinstance(error, BudgetInfeasibleError) else f"{type(error).__name__}: {error}"
    errors = from_all_ranks(group, told)
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if isinstance(other, BudgetInfeasibleError):
            raise other
        if other is not None:
            raise LowtideError(f"{what} failed on rank {rank}, so no rank goes on:\n{other}")
    return result
