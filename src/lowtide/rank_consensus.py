"""One plan for all ranks that train a model together, replicated or sharded.

The rank with the least room above its resident memory solves, and all ranks adopt its plan. Ranks that ran different
operators cannot share a plan; each solves its own within the least budget of all ranks. An error on one rank is raised
on every rank: otherwise the others would wait in their next collective.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from lowtide.errors import LowtideError
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.tracing.data_parallel import ddp_wrapper_of
from lowtide.tracing.subclasses import wrapped_parameters

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
        LowtideError: it failed on another rank. Its own error is raised as it is.
    """
    if group is None:
        return run()
    error: Exception | None = None
    try:
        result = run()
    except Exception as caught:
        error = caught
    errors = from_all_ranks(group, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(errors):
        if text is not None:
            raise LowtideError(f"{what} failed on rank {rank}, so no rank goes on:\n{text}")
    return result


def agree_on_plan(
    group: dist.ProcessGroup, graph: StepGraph, budget_bytes: int, solve: Callable[[StepGraph, int], Plan]
) -> tuple[StepGraph, Plan]:
    """The plan of the rank with the least room, and the graph it was made for.

    Raises:
        BudgetInfeasibleError: the deciding rank found none; on all ranks.
    """
    identity = _plan_identity(graph)
    ranks = from_all_ranks(group, (identity, budget_bytes, budget_bytes - graph.resident_bytes))
    decider = min(range(len(ranks)), key=lambda rank: (ranks[rank][2], rank))
    if any(other != identity for other, _, _ in ranks):
        least_bytes = min(budget for _, budget, _ in ranks)
        return graph, run_on_all_ranks(group, "solving", lambda: solve(graph, least_bytes))
    answer: list[Any] = [None]  # a graph and its plan, or why there is none
    if dist.get_rank(group) == decider:
        try:
            answer = [(graph, solve(graph, budget_bytes))]
        except Exception as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=dist.get_global_rank(group, decider), group=group)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]


def _plan_identity(graph: StepGraph) -> str:
    """Equal where one plan suits both graphs: excludes the timing of events and rank-specific sizes."""
    ops = tuple(replace(op, workspace_bytes=0) for op in graph.ops)
    storages = tuple(replace(s, bytes=0) if s.op is None else s for s in graph.storages)  # shards may be uneven
    return replace(graph, resident={}, signatures=(), events=(), ops=ops, storages=storages).fingerprint
