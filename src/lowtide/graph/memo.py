"""Results that are computed once per graph and dropped together with it."""

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from lowtide.graph.step_graph import StepGraph

T = TypeVar("T")

# By identity: a graph compares and hashes by content, which takes long. A graph that dies takes its entry with it.
_memos: dict[int, tuple[weakref.ref[StepGraph], dict[Any, Any]]] = {}


def memo_of(graph: StepGraph) -> dict[Any, Any]:
    """Results kept for this very graph, by key; copies of the graph start without any.

    A value must not refer to the graph: the graph would then never die.
    """
    key = id(graph)
    if key not in _memos:
        _memos[key] = weakref.ref(graph, lambda _: _memos.pop(key, None)), {}
    return _memos[key][1]


def once_per_graph(function: Callable[[StepGraph], T]) -> Callable[[StepGraph], T]:
    """Decorator: ``function(graph)`` is computed on the first call and remembered until the graph dies."""

    @wraps(function)
    def remembered(graph: StepGraph) -> T:
        memo = memo_of(graph)
        if function not in memo:
            memo[function] = function(graph)
        return memo[function]

    return remembered
