"""What cuBLAS keeps on a CUDA device from the first product on: one workspace for each thread that multiplies.

PyTorch gives each thread a handle of its own, and each handle and stream a workspace
(``ATen/cuda/CublasHandlePool.cpp``). Backward runs in a thread of the device. So a step takes two; one where backward
multiplies nothing.
"""

from lowtide.graph.products import is_product
from lowtide.graph.step_graph import StepGraph
from lowtide.hollow.devices import TargetDevice


def kept_workspace_bytes(graph: StepGraph, target: TargetDevice) -> int:
    """Of the step's threads together; to be added to what is resident."""
    threads = {op.backward for op in graph.ops if is_product(op.name)}
    return len(threads) * target.in_blocks(target.blas_workspace_bytes)
