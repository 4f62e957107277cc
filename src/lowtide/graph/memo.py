"""Results that are computed once per graph and dropped together with it."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

from lowtide.graph.step_graph import StepGraph

T = TypeVar("T")


def memo_of(graph: StepGraph) -> dict[Any, Any]:
    """Results kept for this very graph, by key; copies of the graph start without any."""
    # Beside the fields: a graph compares and hashes by content, which takes long.
    memo: dict[Any, Any] = vars(graph).setdefault("_memo", {})
    return memo


def once_per_graph(function: Callable[[StepGraph], T]) -> Callable[[StepGraph], T]:
    """Decorator: ``function(graph)`` is computed on the first call and remembered until the graph dies."""

    @wraps(function)
    def remembered(graph: StepGraph) -> T:
        memo = memo_of(graph)
        if function not in memo:
            memo[function] = function(graph)
        return memo[function]

    return remembered


def with_resident(graph: StepGraph, part: str, size_bytes: int) -> StepGraph:
    """The step that holds so much of ``part``, as ``StepGraph.resident`` names it: the same graph each time."""
    if graph.resident.get(part, 0) == size_bytes:
        return graph
    memo, key = memo_of(graph), (with_resident, part, size_bytes)
    if key not in memo:
        memo[key] = replace(graph, resident=graph.resident | {part: size_bytes})
    changed: StepGraph = memo[key]
    return changed
