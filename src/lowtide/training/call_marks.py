"""Which calls of a model a backward runs through, and whether the autograd graph of a call is still alive.

A call is known by the sequence numbers of the autograd nodes that it made.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lowtide.step.autograd_leaves import walk
from lowtide.step.operators import tensors_in

_MARK = "lowtide"


class _Mark:
    """Autograd holds it as long as the node lives."""

    __slots__ = ("__weakref__",)


def marks_in(output: object) -> list[Callable[[], object]]:
    """Mark each graph of what a call returned; what comes back gives None when that is gone."""
    tensors = list(tensors_in(output))
    if not tensors:  # something of the user's own, which may hold some
        return [lambda: True]
    marks: list[Callable[[], object]] = []
    for node in {t.grad_fn for t in tensors if t.grad_fn is not None}:
        mark = node.metadata[_MARK] = _Mark()
        marks.append(weakref.ref(mark))
    return marks


def reaches_any(roots: Iterable[Any], nodes: Mapping[int, range]) -> bool:
    """Whether a backward from ``roots`` runs through the graph of any call. A few nodes tell where it does."""
    return any(any(node._sequence_nr() in made for made in nodes.values()) for node in walk(roots))


def calls_reached(roots: Iterable[Any], nodes: Mapping[int, range]) -> set[int]:
    """The calls through whose graphs a backward from ``roots`` runs; ``nodes``: the sequence numbers that each made."""
    reached = {node._sequence_nr() for node in walk(roots)}
    return {call for call, made in nodes.items() if not reached.isdisjoint(made)}
