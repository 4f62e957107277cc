"""What cuBLAS takes on a CUDA device for products of matrices.

Up to PyTorch 2.14 each thread that multiplies keeps one workspace from its first product on: PyTorch gives each thread
a handle of its own, and each handle and stream a workspace (``ATen/cuda/CublasHandlePool.cpp``). Backward runs in a
thread of the device. So a step takes two; one where backward multiplies nothing. From 2.15 on each product takes a
workspace and gives it back.
"""

from typing import Any

import torch

from lowtide.graph.products import is_product
from lowtide.graph.step_graph import StepGraph
from lowtide.hollow.cuda_attention import torch_release
from lowtide.hollow.devices import TargetDevice

_GIVEN_BACK_FROM = (2, 15)
_LT_BYTES = 1 << 20  # of products with a vector added to each row, which cuBLASLt makes


def kept_workspace_bytes(graph: StepGraph, target: TargetDevice) -> int:
    """Of the step's threads together; to be added to what is resident."""
    if are_given_back():
        return 0
    threads = {op.backward for op in graph.ops if is_product(op.name)}
    return len(threads) * target.in_blocks(target.blas_workspace_bytes)


def are_given_back() -> bool:
    """Whether each product takes its workspace anew, in the installed PyTorch."""
    return torch_release() >= _GIVEN_BACK_FROM


def product_workspace_bytes(packet: str, args: tuple, target: TargetDevice) -> int:
    """Of one product of matrices, in a PyTorch where it is given back; 0 for other operators."""
    if not is_product(packet):
        return 0
    if packet == "aten.addmm" and _adds_a_vector(args[0], args[1], args[2]):
        return _LT_BYTES
    return target.in_blocks(target.blas_workspace_bytes)


def _adds_a_vector(bias: Any, left: torch.Tensor, right: torch.Tensor) -> bool:
    contiguous = bias.dim() == 1 and bias.is_contiguous() and bias.shape[0] == right.shape[1]
    return contiguous and left.shape[0] > 1 and min(left.shape[1], right.shape[1]) > 1
