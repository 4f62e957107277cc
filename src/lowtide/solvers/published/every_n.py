"""Checkpointing of every n-th repeated layer, the first one included.

Layer-skipping as in transformers' ``every_n_layers`` and Megatron's ``--recompute-method block``.
"""

from lowtide.graph.step_graph import StepGraph
from lowtide.solvers.graph_queries import checkpoint, repeated_layers


def every_n(graph: StepGraph, n: int = 2) -> dict[int, str]:
    """Actions under which layers 0, n, 2n, ... are checkpointed.

    Raises:
        ValueError: ``n`` is not a positive int.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n={n!r} is not a positive int. Write n=2 to checkpoint every second layer.")
    layer_of = repeated_layers(graph, "every_n")
    return checkpoint(graph, {op: layer for op, layer in layer_of.items() if layer % n == 0})
