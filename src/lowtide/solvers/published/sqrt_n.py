"""Segments of about the square root of the depth; what crosses their borders is kept.

Chen, Xu, Zhang, Guestrin 2016, "Training deep nets with sublinear memory cost", https://arxiv.org/abs/1604.06174

Differs: segments are equal in layers (in ops where no layer repeats), not in bytes, and a value is replayed when
backward asks for it, not a whole segment at once.
"""

from math import isqrt

from lowtide.graph.step_graph import StepGraph
from lowtide.solvers.graph_queries import checkpoint, layers, replayable_ops


def sqrt_n(graph: StepGraph) -> dict[int, str]:
    """Actions under which L layers (or ops) form about sqrt(L) checkpointed segments."""
    layer_of = layers(graph) or {op: place for place, op in enumerate(sorted(replayable_ops(graph)))}
    count = len(set(layer_of.values()))
    length = isqrt(max(count - 1, 0)) + 1  # the square root, rounded up
    return checkpoint(graph, {op: layer // length for op, layer in layer_of.items()})
