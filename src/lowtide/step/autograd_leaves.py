"""The leaves of an autograd graph: what a backward from its roots gives gradients to."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def walk(roots: Iterable[Any]) -> Iterator[Any]:
    """Each node that a backward from ``roots`` (tensors or graph edges) runs through. About 0.5 us a node."""
    todo = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [edge[0] for edge in node.next_functions]


def leaves_of(roots: Iterable[Any]) -> list[torch.Tensor]:
    """The leaves that a backward from ``roots`` gives gradients to."""
    roots = list(roots)
    leaves = [root for root in roots if isinstance(root, torch.Tensor) and root.is_leaf]
    accumulating = (getattr(node, "variable", None) for node in walk(roots) if not node.next_functions)
    return [*leaves, *(leaf for leaf in accumulating if leaf is not None)]


def nodes_since(first: int, outputs: list[torch.Tensor]) -> Iterator[Any]:
    """The nodes behind ``outputs`` that were made since then; not those that accumulate gradients."""
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node in seen or node._sequence_nr() < first or not node.next_functions:
            continue
        seen.add(node)
        yield node
        stack += [n for n, _ in node.next_functions if n is not None]
