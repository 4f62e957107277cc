"""Selective checkpointing: matrix products, convolutions and attention are kept, the cheap rest is recomputed.

The policy of PyTorch's ``create_selective_checkpoint_contexts`` as published in
https://pytorch.org/blog/activation-checkpointing-techniques/, applied to every repeated layer (to the whole step where
no layer repeats).
"""

from lowtide.graph.step_graph import StepGraph
from lowtide.solvers.graph_queries import checkpoint, layers

_DEAR = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "convolution", "conv")


def selective(graph: StepGraph) -> dict[int, str]:
    """Actions under which only outputs of dear ops, and what crosses a layer's border, are kept."""
    layer_of = layers(graph) or {op.id: 0 for op in graph.forward_ops}
    dear = {s for op in graph.forward_ops if _is_dear(op.name) for s in op.makes}
    return checkpoint(graph, layer_of, keep=dear)


def _is_dear(name: str) -> bool:
    base = name.split(".")[1] if "." in name else name
    return base in _DEAR or "attention" in base or base.startswith(("conv", "_scaled_mm", "_grouped_mm"))
