"""What CUDA's own kernels allocate beside their outputs, by formula.

Each formula follows PyTorch's host code, which its docstring names, or the sizes that the caching allocator counted
(``benchmarks/op_workspaces.py`` measures a list of calls again, and ``tests/hollow/test_cuda_workspaces.py`` compares).
Other operators count as 0: elementwise ones, views, and products of what lies as cuBLAS takes it need nothing.

Not known, and listed under ``provenance["assumed"]``: what cuDNN takes for convolutions, recurrent layers and
attention.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowtide.hollow.attention_workspaces import BACKWARD, FORWARD
from lowtide.hollow.devices import TargetDevice
from lowtide.hollow.reductions import reduction_bytes

Rule = Callable[[tuple, TargetDevice], int]
# Sizes of CUB's radix sort and scan for compute capability 9.0, elements of a block of threads by bytes of a key. Other
# devices have other sizes, and occupancy has a say: sorts may be off by a few blocks, those of half precision by more.
_SORT_TILE = {1: 5632, 2: 5632, 4: 5376, 8: 4608}
_SCAN_TILE = {1: 7680, 2: 7680, 4: 1920, 8: 896}
_SMALL_SORT = 4096  # up to here a row is sorted by one block
_SMALL_EMBEDDING = 3072  # indices; up to here no sort


def has_rule(packet: str) -> bool:
    """Whether what an operator takes besides depends on shapes and strides, by a formula of its own."""
    return packet in _BY_PACKET


def workspace_bytes(func: Any, args: tuple, target: TargetDevice) -> int:
    """Of one call on a CUDA device, in whole blocks.

    Args:
        func: An operator; ``args``: what it is given, whose tensors may be hollow or on ``meta``.
    """
    packet = str(func.overloadpacket)
    rule = _RULES.get(str(func)) or _RULES.get(packet)
    copied = sum(_copy(args[i], target) for i in _MADE_CONTIGUOUS.get(packet, ()) if i < len(args))
    return copied + (0 if rule is None else rule(args, target))


# -- copies


def _copy(value: Any, target: TargetDevice, memory_format: torch.memory_format = torch.contiguous_format) -> int:
    if not isinstance(value, torch.Tensor) or value.is_contiguous(memory_format=memory_format):
        return 0
    return target.in_blocks(value.numel() * value.itemsize)


def _matrices(first: int) -> Rule:
    """Products of matrices that lie neither by rows nor by columns copy them first."""

    def rule(args: tuple, target: TargetDevice) -> int:
        return sum(
            target.in_blocks(m.numel() * m.itemsize) for m in args[first : first + 2] if not _is_taken_by_blas(m)
        )

    return rule


def _is_taken_by_blas(matrix: torch.Tensor) -> bool:
    (rows, columns), (down, along) = matrix.shape[-2:], matrix.stride()[-2:]
    return (down == 1 and along >= max(1, rows)) or (along == 1 and down >= max(1, columns))


# -- reductions


def _reduction(accumulator_bytes: int | None = 4, *, dims_at: int | None = None) -> Rule:
    """A reduction of the first argument; ``accumulator_bytes`` None: as the input's elements."""

    def rule(args: tuple, target: TargetDevice) -> int:
        x = args[0]
        dims = args[dims_at] if dims_at is not None and dims_at < len(args) else None
        dims = [dims] if isinstance(dims, int) else list(dims or ())
        each = x.itemsize if accumulator_bytes is None else accumulator_bytes
        if x.dtype in (torch.float64, torch.int64) and accumulator_bytes == 4:
            each = 8
        return reduction_bytes(
            x.shape, x.stride(), dims, target, element_bytes=x.itemsize, accumulator_bytes=each
        )  # fmt: skip

    return rule


def _log_sum_exp(args: tuple, target: TargetDevice) -> int:
    """``ReduceOps.cpp``: maxima of the rows, and exponentials of what is less than them."""
    x, dims = args[0], args[1]
    rows = x.numel() // max(math.prod(x.shape[d] for d in dims), 1)
    return target.in_blocks(x.numel() * x.itemsize) + target.in_blocks(rows * x.itemsize)


# -- softmax and norms


def _softmax_backward(args: tuple, target: TargetDevice) -> int:
    """``SoftMax.cu``: the product of gradient and output. It does not need that of ``log_softmax``."""
    grad = args[0]
    return target.in_blocks(grad.numel() * grad.itemsize)


def _safe_softmax(args: tuple, target: TargetDevice) -> int:
    """``native/transformers/attention.cpp``: which numbers are minus infinity, which rows are nothing else, and 0."""
    x, dim = args[0], args[1]
    rows = x.numel() // max(x.shape[dim], 1)
    return target.in_blocks(x.numel()) + target.in_blocks(rows) + target.block_bytes


def _group_norm(args: tuple, target: TargetDevice) -> int:
    """``group_norm_kernel.cu``: statistics in float32 for half precision, and scale and shift by sample and channel."""
    x, weight, bias, samples, channels, pixels, groups = args[:7]
    count = 0 if x.itemsize >= 4 else 2 * target.in_blocks(4 * samples * groups)
    if pixels > 1 and (weight is not None or bias is not None):
        count += 2 * target.in_blocks(4 * samples * channels)
    return count


def _group_norm_backward(args: tuple, target: TargetDevice) -> int:
    """Two sums for each sample and channel, and three factors."""
    weight, samples, channels, groups, wanted = args[4], args[5], args[6], args[8], args[9]
    count = 2 * target.in_blocks(4 * samples * channels)
    if wanted[0]:
        count += 2 * target.in_blocks(4 * samples * groups)
        count += target.in_blocks(4 * samples * channels) if weight is not None else 0
    return count


# -- sorts, scans, indices


def _radix_sort(count: int, key_bytes: int, passes: int, target: TargetDevice) -> int:
    """Counts of each pass, and of each block of threads."""
    if count <= 2048:
        return target.block_bytes
    return 2048 * passes + 1024 * -(-count // _SORT_TILE[key_bytes]) + target.block_bytes


def _sort(dim_at: int) -> Rule:
    def rule(args: tuple, target: TargetDevice) -> int:
        x = args[0]
        dim = args[dim_at] if dim_at < len(args) else -1
        rows = x.shape[dim] if x.dim() else 1
        if rows <= 1:
            return 0
        if rows <= _SMALL_SORT:  # by one block, in place; the places are written down first
            return target.in_blocks(8 * rows)
        if x.numel() != rows:  # rows are sorted as one, with the number of each, and then by that number
            count = x.numel()
            return 4 * target.in_blocks(8 * count) + _radix_sort(count, x.itemsize, x.itemsize, target)
        twice = -(-rows * x.itemsize // 256) * 256 + -(-8 * rows // 256) * 256
        more = _radix_sort(rows, x.itemsize, x.itemsize, target) - target.block_bytes + 256
        return target.in_blocks(8 * rows) + target.in_blocks(twice + more)

    return rule


def _cumulative(args: tuple, target: TargetDevice) -> int:
    """``ScanKernels.cpp``: one row is scanned by CUB, several by a kernel that needs nothing; integers become int64."""
    x, dim = args[0], args[1]
    itemsize, count = x.itemsize, 0
    if not x.is_floating_point() and x.dtype != torch.int64:
        itemsize, count = 8, target.in_blocks(8 * x.numel())
    if x.dim() and x.numel() == x.shape[dim] and x.numel():
        word = 8 if itemsize == 4 else 16
        count += target.in_blocks(word * (32 + -(-x.numel() // _SCAN_TILE[itemsize]))) + target.block_bytes
    return count


def _embedding_backward(args: tuple, target: TargetDevice) -> int:
    """``Embedding.cu``: many indices are sorted, with their places."""
    indices = args[1]
    if indices.numel() <= _SMALL_EMBEDDING:
        return 0
    return 4 * target.in_blocks(8 * indices.numel()) + 2048


def _index_put(args: tuple, target: TargetDevice) -> int:
    """``Indexing.cu``: what is added up goes in the order of its sorted places."""
    x, indices = args[0], [i for i in args[1] if i is not None]
    accumulate = args[3] if len(args) > 3 else False
    if not accumulate or not indices or indices[0].dtype in (torch.bool, torch.uint8):
        return 0
    count = math.prod(torch.broadcast_shapes(*(i.shape for i in indices)))
    places = math.prod(n for n, i in zip(x.shape, args[1]) if i is not None)
    passes = max(-(-max(places, 1).bit_length() // 8), 1)
    return 4 * target.in_blocks(8 * count) + _radix_sort(count, 8, passes, target)


def _grouped_product(args: tuple, target: TargetDevice) -> int:
    """``GroupMM.cu``: tensor maps for each multiprocessor and a problem for each group; float32 goes one by one."""
    left, right, offsets = args[0], args[1], args[2] if len(args) > 2 else None
    if left.dtype != torch.bfloat16 or target.capability[0] != 9:
        return 0
    groups = offsets.numel() if offsets is not None else max(left.shape[0], right.shape[0])
    return 512 * target.multiprocessors + target.in_blocks(56 * groups + 16)


# -- losses and convolutions


def _mean_loss(args: tuple, target: TargetDevice) -> int:
    """``Loss.cpp``: a loss for each element, of which the mean or the sum is taken."""
    reduction = args[2] if len(args) > 2 else 1
    return target.in_blocks(args[0].numel() * args[0].itemsize) + _mean_of_all(args[0], target) if reduction else 0


def _mean_of_all(losses: torch.Tensor, target: TargetDevice) -> int:
    count = losses.numel()
    return reduction_bytes((count,), (1,), (), target, element_bytes=losses.itemsize)


def _mean_in_place(reduction_at: int) -> Rule:
    """Losses are made where their mean or sum is left, which is a tensor of its own first."""

    def rule(args: tuple, target: TargetDevice) -> int:
        if len(args) > reduction_at and not args[reduction_at]:
            return 0
        return target.block_bytes + _mean_of_all(args[0], target)

    return rule


def _loss_of_logits(args: tuple, target: TargetDevice) -> int:
    """``Loss.cpp``: logarithms of probabilities; then factors of positive ones, or losses before their mean."""
    each = target.in_blocks(args[0].numel() * args[0].itemsize)
    positive = args[3] if len(args) > 3 else None
    if len(args) > 4 and not args[4]:
        return each if positive is None else each + target.in_blocks(positive.numel() * positive.itemsize)
    factors = 0 if positive is None else target.in_blocks(positive.numel() * positive.itemsize) - target.block_bytes
    return 2 * each + max(_mean_of_all(args[0], target), factors)


def _soft_margin_backward(args: tuple, target: TargetDevice) -> int:
    """``Loss.cpp``: negative targets, their products and exponentials, all before the gradient."""
    return 2 * target.in_blocks(args[1].numel() * args[1].itemsize)


def _convolution(first: int) -> Rule:
    """``NaiveConvolution*.cu``: the columns of one sample, unless each is a pixel, or a channel has its own kernel.

    Where cuDNN is on, as it is unless ``torch.backends.cudnn.enabled`` is off, it takes a workspace that nobody tells.
    Either takes images, kernels and gradients in one memory format, and copies what comes in another: the gradient of
    patches that a transformer takes as a sequence always does.
    """

    def rule(args: tuple, target: TargetDevice) -> int:
        x, weight = args[first], args[first + 1]
        stride, padding, dilation, transposed, _, groups = args[first + 3 : first + 9]
        if not x.numel():
            return 0
        copies = sum(_copy(t, target, _memory_format(x, weight)) for t in args[: first + 2])
        if torch.backends.cudnn.enabled or transposed or groups > 1:
            return copies
        kernel, pixels = weight.shape[2:], list(x.shape[2:])
        for i, size in enumerate(pixels):
            step, pad, wide = (v[i if len(v) > 1 else 0] for v in (stride, padding, dilation))
            pixels[i] = (size + 2 * pad - wide * (kernel[i] - 1) - 1) // step + 1
        if first == 0 and all(k == 1 for k in kernel) and set(stride) == {1} and not any(padding):
            return copies  # backward has columns all the same
        return copies + target.in_blocks(x.shape[1] * math.prod(kernel) * math.prod(pixels) * x.itemsize)

    return rule


def _memory_format(x: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """``cudnn_conv_suggest_memory_format``: channels last if either is, and not in double precision."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or not torch.backends.cudnn.enabled or x.dtype == torch.float64:
        return torch.contiguous_format
    is_last = any(t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in (x, weight))
    return last if is_last else torch.contiguous_format


_RULES: dict[str, Rule] = {
    **FORWARD,
    **BACKWARD,
    "aten.mm": _matrices(0),
    "aten.bmm": _matrices(0),
    "aten.addmm": _matrices(1),
    "aten.baddbmm": _matrices(1),
    "aten.sum": _reduction(dims_at=1),
    "aten.mean": _reduction(dims_at=1),
    "aten.prod": _reduction(dims_at=1),
    "aten.linalg_vector_norm": _reduction(dims_at=2),
    "aten.amax": _reduction(None, dims_at=1),
    "aten.amin": _reduction(None, dims_at=1),
    "aten.any": _reduction(None, dims_at=1),
    "aten.all": _reduction(None, dims_at=1),
    "aten.max.default": _reduction(None),
    "aten.min.default": _reduction(None),
    "aten.max.dim": _reduction(16, dims_at=1),
    "aten.min.dim": _reduction(16, dims_at=1),
    "aten.argmax": _reduction(16, dims_at=1),
    "aten.argmin": _reduction(16, dims_at=1),
    "aten.var": _reduction(16, dims_at=1),
    "aten.std": _reduction(16, dims_at=1),
    "aten.var_mean": _reduction(16, dims_at=1),
    "aten.std_mean": _reduction(16, dims_at=1),
    "aten.logsumexp": _log_sum_exp,
    "aten._softmax_backward_data": _softmax_backward,
    "aten._safe_softmax": _safe_softmax,
    "aten.native_group_norm": _group_norm,
    "aten.native_group_norm_backward": _group_norm_backward,
    "aten.sort.default": _sort(1),
    "aten.sort.stable": _sort(2),
    "aten.argsort": _sort(1),
    "aten.cumsum": _cumulative,
    "aten.cumprod": _cumulative,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.index_put": _index_put,
    "aten.index_put_": _index_put,
    "aten._index_put_impl_": _index_put,
    "aten._grouped_mm": _grouped_product,
    "aten.mse_loss": _mean_loss,
    "aten.l1_loss": _mean_loss,
    "aten.smooth_l1_loss": _mean_loss,
    "aten.huber_loss": _mean_loss,
    "aten.binary_cross_entropy": _mean_in_place(3),
    "aten.soft_margin_loss": _mean_in_place(2),
    "aten.soft_margin_loss_backward": _soft_margin_backward,
    "aten.binary_cross_entropy_with_logits": _loss_of_logits,
    "aten.convolution": _convolution(0),
    "aten.convolution_backward": _convolution(1),
}
_BY_PACKET = frozenset(".".join(name.split(".")[:2]) for name in _RULES)
# Arguments that a kernel reads from a contiguous copy.
_MADE_CONTIGUOUS: dict[str, Sequence[int]] = {
    "aten.native_layer_norm": (0,),
    "aten.native_layer_norm_backward": (0, 1),
    "aten._fused_rms_norm": (0,),
    "aten._fused_rms_norm_backward": (0, 1),
    "aten._softmax": (0,),
    "aten._softmax_backward_data": (1,),
    "aten._log_softmax": (0,),
    "aten._log_softmax_backward_data": (0, 1),
    "aten.embedding": (1,),
    "aten.embedding_dense_backward": (0,),
    "aten.nll_loss_forward": (0,),
}
