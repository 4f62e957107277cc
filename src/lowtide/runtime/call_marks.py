"""Which calls of a model a backward is of: graphs are marked by call, and a backward finds those that it reaches."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from lowtide.tracing.autograd_leaves import nodes_of
from lowtide.tracing.operators import tensors_in

_MARK = "lowtide"


class _Mark:
    """Which call of the step a graph is of. Autograd holds it as long as the node lives."""

    __slots__ = ("__weakref__", "position")

    def __init__(self, position: int) -> None:
        self.position = position


def marks_in(output: object, position: int) -> list[Callable[[], object]]:
    """Mark each graph of what a call returned; what comes back gives None when that is gone."""
    tensors = list(tensors_in(output))
    if not tensors:  # something of the user's own, which may hold some
        return [lambda: True]
    marks: list[Callable[[], object]] = []
    for node in {t.grad_fn for t in tensors if t.grad_fn is not None}:
        mark = node.metadata[_MARK] = _Mark(position)
        marks.append(weakref.ref(mark))
    return marks


def calls_reached(roots: Iterable[Any]) -> set[int]:
    """The calls whose graphs a backward from ``roots`` runs through."""
    marks = (node.metadata.get(_MARK) for node in nodes_of(roots))
    return {mark.position for mark in marks if mark is not None}
