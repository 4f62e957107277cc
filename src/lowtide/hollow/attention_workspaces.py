"""What flash and memory-efficient attention allocate on a CUDA device beside their outputs.

Sources: ``ATen/native/transformers/cuda/flash_attn/flash_api.cpp``, ``attention.cu`` and ``attention_backward.cu``
beside it, and ``mem_eff_attention/kernel_backward.h``. The kernels among which the latter choose were read off the
allocator (``benchmarks/op_workspaces.py``).
"""

import math
from typing import Any, NamedTuple

import torch

from lowtide.hollow.devices import TargetDevice

_FLOAT = 4
_HALF = (torch.float16, torch.bfloat16)


def flash_forward(args: tuple, target: TargetDevice) -> int:
    """Parts of outputs where several blocks share the keys of a query; with dropout, a seed."""
    q, k, dropout_p = args[0], args[1], args[3] if len(args) > 3 else 0.0
    if dropout_p > 0:
        return target.block_bytes
    batch, heads, queries, width = q.shape
    splits = _splits(batch * heads * _ceil(queries, 64), 2 * target.multiprocessors, _ceil(k.shape[2], _keys(width)))
    if splits <= 1:
        return 0
    rows = splits * batch * heads * queries
    return target.in_blocks(_FLOAT * rows) + target.in_blocks(_FLOAT * rows * _rounded_width(width))


def _keys(width: int) -> int:
    """Of a block of threads."""
    return 256 if width <= 64 else 128 if width <= 128 else 64


def _splits(blocks: int, processors: int, key_blocks: int) -> int:
    """Among how many blocks keys are divided: ``num_splits_heuristic``."""
    if blocks >= 0.8 * processors:
        return 1
    most = min(128, processors, key_blocks)
    # Divided by one more, a share may be as long as before: those counts are left out.
    useful = [n for n in range(1, most + 1) if n == 1 or _ceil(key_blocks, n) != _ceil(key_blocks, n - 1)]

    def efficiency(n: int) -> float:
        waves = blocks * n / processors
        return waves / math.ceil(waves)

    best = max(map(efficiency, useful), default=1.0)
    return next((n for n in useful if efficiency(n) >= 0.85 * best), 1)


def _rounded_width(width: int) -> int:
    return _ceil(width, 32) * 32 if width <= 192 else 256


def flash_backward(args: tuple, target: TargetDevice) -> int:
    """Sums in float32 for queries and rows, gradients of keys for each head, and copies of what lies otherwise."""
    grad, q, k, _, output = args[:5]
    batch, heads, queries, width = q.shape
    rows = _ceil(queries, 128) * 128
    sums = 1
    if torch.are_deterministic_algorithms_enabled():
        sums = max(_ceil(target.multiprocessors, batch * heads), 1)
    count = target.in_blocks(_FLOAT * batch * heads * rows)
    count += target.in_blocks(_FLOAT * sums * batch * rows * heads * _rounded_width(width))
    if k.shape[1] != heads:
        count += 2 * target.in_blocks(batch * k.shape[2] * heads * width * k.itemsize)
    for tensor in (grad, output):
        if not tensor.transpose(1, 2).is_contiguous():
            count += target.in_blocks(tensor.numel() * tensor.itemsize)
    return count


def efficient_forward(args: tuple, target: TargetDevice) -> int:
    """Outputs in float32 where a head's values are more than a block holds."""
    q, v = args[0], args[2]
    width = v.shape[-1]
    if q.dtype not in _HALF or width <= 128:
        return 0
    return target.in_blocks(_FLOAT * q.shape[0] * q.shape[1] * q.shape[2] * width)


class _Kernel(NamedTuple):
    """Of a memory-efficient backward: a block's queries, keys and columns; whether sums of keys are kept in memory."""

    queries: int
    keys: int
    columns: int
    keeps_sums: bool = False


def _kernel(dtype: torch.dtype, width: int, shared_bytes: int) -> _Kernel:
    """The first that the device has shared memory for."""
    roomy = shared_bytes >= 160 << 10
    if width <= 64:
        return _Kernel(64, 64, 64)
    if dtype not in _HALF:
        return _Kernel(128, 64, 64) if roomy else _Kernel(64, 64, 64)
    if width > 128:
        return _Kernel(128, 64, 64, keeps_sums=True)
    if roomy:
        return _Kernel(128, 128, 128)
    return _Kernel(128, 64, 64) if width <= 96 else _Kernel(64, 64, 64, keeps_sums=True)


def efficient_backward(args: tuple, target: TargetDevice) -> int:
    """Sums of queries, and where they do not fit of keys, in float32; gradients of keys for each head."""
    grad, q, k, v = args[:4]
    dropout_p = args[9] if len(args) > 9 else 0.0
    batch, heads, queries, width = q.shape
    keys, value_width = k.shape[2], v.shape[3]
    kernel = _kernel(q.dtype, max(width, value_width), target.shared_memory_bytes)
    if dropout_p > 0 and kernel == _Kernel(128, 64, 64) and q.dtype in _HALF:
        kernel = _Kernel(64, 64, 64, keeps_sums=True)  # the mask needs shared memory, too
    element = _ceil(queries, kernel.queries) * _ceil(width, kernel.columns) * (
        _FLOAT * kernel.queries * kernel.columns + 16  # 16: lock and counter
    )  # fmt: skip
    if kernel.keeps_sums:
        splits = max(min(_ceil(keys, kernel.keys), 200 // (batch * heads)), 1)
        if batch * heads >= 256 and keys <= 2 * kernel.keys:
            splits = 1
        if torch.are_deterministic_algorithms_enabled():
            splits = 1
        columns = sum(_ceil(w, kernel.queries) * kernel.queries for w in (width, value_width))
        element += _FLOAT * splits * kernel.keys * columns
    delta = target.in_blocks(_FLOAT * batch * heads * queries)
    count = delta + target.in_blocks(batch * heads * element)
    if q.dtype not in _HALF:
        # It multiplies gradient and output first, and sums and transposes that.
        count = max(count, target.in_blocks(_FLOAT * grad.numel()) + 2 * delta)
    if k.shape[1] != heads:
        count += sum(target.in_blocks(batch * keys * heads * w * k.itemsize) for w in (width, value_width))
    return count


def _ceil(count: int, by: int) -> int:
    return -(-count // by)


FORWARD: dict[str, Any] = {
    "aten._scaled_dot_product_flash_attention": flash_forward,
    "aten._scaled_dot_product_efficient_attention": efficient_forward,
}
BACKWARD: dict[str, Any] = {
    "aten._scaled_dot_product_flash_attention_backward": flash_backward,
    "aten._scaled_dot_product_efficient_attention_backward": efficient_backward,
}
