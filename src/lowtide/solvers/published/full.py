"""Full checkpointing: of every repeated layer only what crosses its border is kept.

What ``gradient_checkpointing_enable()`` of transformers and Megatron's ``--recompute-granularity full`` do
(https://docs.pytorch.org/docs/stable/checkpoint.html). Differs: the tape replays a layer op by op, as backward asks,
and never what backward does not need.
"""

from lowtide.graph.step_graph import StepGraph
from lowtide.solvers.graph_queries import checkpoint, repeated_layers


def full(graph: StepGraph) -> dict[int, str]:
    """Actions under which every repeated layer is checkpointed."""
    return checkpoint(graph, repeated_layers(graph, "full"))
