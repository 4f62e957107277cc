"""One plan for all ranks of a data parallel model: the rank with the least memory decides.

Ranks that ran different operators cannot share a plan; they still share the least budget. What a rank cannot do no
rank does: an error on one is raised on all, so that none waits for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from lowtide.errors import BudgetInfeasibleError, LowtideError
from lowtide.graph.step_graph import StepGraph
from lowtide.plan import Plan
from lowtide.tracing.parallel import wrapper_of

T = TypeVar("T")


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that train ``model`` together; None if there is one only."""
    wrapper = wrapper_of(model)
    if wrapper is None or dist.get_world_size(wrapper.process_group) == 1:
        return None
    return wrapper.process_group


def on_all(group: dist.ProcessGroup | None, what: str, run: Callable[[], T]) -> T:
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
    told = _gather(group, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = [(rank, text) for rank, text in enumerate(told) if text is not None]
    if failed:
        rank, text = failed[0]
        raise LowtideError(f"{what} failed on rank {rank}, so no rank goes on:\n{text}")
    return result


def agree(
    group: dist.ProcessGroup, graph: StepGraph, budget_bytes: int, solve: Callable[[StepGraph, int], Plan]
) -> tuple[StepGraph, Plan]:
    """The graph and the plan to go by.

    Raises:
        BudgetInfeasibleError: the deciding rank found none; on all ranks.
    """
    alike = replace(graph, resident={}).fingerprint
    told = _gather(group, (alike, budget_bytes, graph.resident))
    decider = min(range(len(told)), key=lambda rank: (told[rank][1], rank))
    least_bytes = told[decider][1]
    if any(other != alike for other, _, _ in told):
        return graph, on_all(group, "solving", lambda: solve(graph, least_bytes))
    graph = replace(graph, resident=told[decider][2])
    answer: list[Any] = [None]
    if dist.get_rank(group) == decider:
        try:
            answer = [solve(graph, least_bytes)]
        except BudgetInfeasibleError as error:
            answer = [(str(error), error.budget_bytes, error.least_bytes)]
        except Exception as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=dist.get_global_rank(group, decider), group=group)
    plan = answer[0]
    if isinstance(plan, tuple):
        raise BudgetInfeasibleError(plan[0], budget_bytes=plan[1], least_bytes=plan[2])
    if isinstance(plan, Exception):
        raise plan
    return graph, plan


def _gather(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    return told
