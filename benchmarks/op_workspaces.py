"""What single ops allocate beside their outputs on a CUDA device, as its caching allocator counts.

    python op_workspaces.py          adds what this device takes to results/op_workspaces.json

``tests/hollow/test_cuda_workspaces.py`` compares the formulas of ``lowtide.hollow.cuda_workspaces`` with it. A runtime
without a GPU will do: the host's code asks for the memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lowtide.measurement.op_inputs import describe, rebuild

RESULTS = Path(__file__).parent / "results" / "op_workspaces.json"
aten = torch.ops.aten
F32, BF16, INT = torch.float32, torch.bfloat16, torch.int64


def _t(*size: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def calls() -> Iterator[tuple[Any, ...]]:
    """(operator, its arguments, on ``meta``): those of training steps that need memory of their own."""
    for dtype in (F32, BF16):
        yield from _reductions(dtype)
        yield from _norms_and_losses(dtype)
        yield from _products(dtype)
        yield from _efficient(dtype)
    yield from _flash()
    for count in (8, 1000, 3072, 3073, 4096, 10_000, 65_536, 200_000):
        yield from _sorts_and_indices(count)


def _reductions(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for size in ((4096, 3072), (8192, 768), (65_536, 64), (200, 30), (2, 512, 4096), (16_384, 1001)):
        x = _t(*size, dtype=dtype)
        yield aten.sum.dim_IntList, x, [*range(len(size) - 1)], True
        yield aten.sum.dim_IntList, x, [-1]
        yield aten.var_mean.correction, x, [0]
        yield aten.amax.default, x, [0]
    yield aten.sum.dim_IntList, _t(4, 64, 96, 96, dtype=dtype), [0, 2, 3]
    yield aten.sum.dim_IntList, _t(512, 8192, dtype=dtype).t(), [0]
    yield aten.sum.default, _t(1 << 22, dtype=dtype)
    yield aten.mean.default, _t(300, 700, dtype=dtype)
    yield aten.max.dim, _t(64, 1 << 16, dtype=dtype), 1
    yield aten.linalg_vector_norm.default, _t(1 << 20, dtype=dtype)
    yield aten.logsumexp.default, _t(512, 1000, dtype=dtype), [-1]


def _norms_and_losses(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    x, wide = _t(64, 1000, dtype=dtype), _t(2, 4, 128, 128, dtype=dtype)
    yield aten._softmax_backward_data.default, wide, wide, -1, dtype
    yield aten._log_softmax_backward_data.default, x, x, 1, dtype
    yield aten._log_softmax_backward_data.default, _t(1000, 64, dtype=dtype).t(), x, 1, dtype
    if dtype == F32:
        yield aten._safe_softmax.default, wide, -1
    yield aten.mse_loss.default, x, x
    yield aten.mse_loss.default, x, x, 0
    image, factors = _t(2048, 1024, dtype=dtype), _t(1024, dtype=dtype)
    for each in (x, image):
        yield aten.mse_loss.default, each, each
        yield aten.smooth_l1_loss.default, each, each
        yield aten.huber_loss.default, each, each, 2
        yield aten.soft_margin_loss.default, each, each
        yield aten.binary_cross_entropy.default, each, each
        for reduction in (0, 1):
            yield aten.binary_cross_entropy_with_logits.default, each, each, None, None, reduction
    for reduction in (0, 1):
        yield aten.binary_cross_entropy.default, image, image, None, reduction
        yield aten.binary_cross_entropy_with_logits.default, image, image, image, factors, reduction
    rows = _t(2048, 256, dtype=dtype)
    weight, sums = _t(256, dtype=dtype), _t(2048, 1)
    yield aten.native_layer_norm.default, rows, [256], weight, weight, 1e-5
    yield aten.native_layer_norm_backward.default, rows, rows, [256], sums, sums, weight, weight, [True] * 3
    yield aten._fused_rms_norm_backward.default, rows, rows, [256], sums, weight, [True] * 2
    for samples, channels, groups in ((4, 8, 2), (16, 512, 32)):
        pixels, scale = _t(samples, channels, 64, dtype=dtype), _t(channels, dtype=dtype)
        found = _t(samples, groups, dtype=dtype)
        numbers = (samples, channels, 64, groups)
        yield aten.native_group_norm.default, pixels, scale, scale, *numbers, 1e-5
        yield aten.native_group_norm.default, pixels, None, None, *numbers, 1e-5
        yield aten.native_group_norm_backward.default, pixels, pixels, found, found, scale, *numbers, [True] * 3


def _products(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    a, b = _t(64, 200, dtype=dtype), _t(100, 64, dtype=dtype)
    yield aten.mm.default, a[:, ::2], b
    yield aten.mm.default, _t(100, 64, dtype=dtype).t(), b
    yield aten.addmm.default, _t(64, dtype=dtype), a[:, ::2], b
    yield aten.bmm.default, _t(4, 64, 200, dtype=dtype)[:, :, ::2], _t(4, 100, 64, dtype=dtype)
    image = _t(2, 16, 32, 32, dtype=dtype)
    for kernel, padding in ((3, 1), (1, 0)):
        weight = _t(32, 16, kernel, kernel, dtype=dtype)
        numbers = ([1, 1], [padding] * 2, [1, 1], False, [0, 0], 1)
        yield aten.convolution.default, image, weight, None, *numbers
        grad = _t(2, 32, 32, 32, dtype=dtype)
        yield aten.convolution_backward.default, grad, image, weight, None, *numbers, [True, True, False]
    yield (
        aten.convolution.default, _t(2, 16, 256, dtype=dtype), _t(32, 16, 3, dtype=dtype), None,
        [2], [1], [1], False, [0], 1,
    )  # fmt: skip
    if dtype == BF16:
        for groups in (4, 64, 128):
            offsets = _t(groups, dtype=torch.int32)
            yield aten._grouped_mm.default, _t(512, 128, dtype=dtype), _t(groups, 128, 64, dtype=dtype), offsets


def _efficient(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    shapes = ((2, 4, 4, 256, 256, 32), (2, 4, 2, 100, 100, 64), (1, 8, 2, 512, 512, 128), (2, 4, 4, 250, 130, 96),
              (1, 4, 4, 300, 300, 256), (1, 2, 2, 1024, 64, 160))  # fmt: skip
    for batch, heads, key_heads, queries, keys, width in shapes:
        for dropout in (0.0, 0.1):
            q = _t(batch, heads, queries, width, dtype=dtype)
            k = _t(batch, key_heads, keys, width, dtype=dtype)
            output = _t(batch, queries, heads, width, dtype=dtype).transpose(1, 2)
            sums = _t(batch, heads, -(-queries // 32) * 32)
            seed = torch.empty((), dtype=INT, device="cpu" if dropout else "meta")
            yield aten._scaled_dot_product_efficient_attention.default, q, k, k, None, True, dropout
            yield (
                aten._scaled_dot_product_efficient_attention_backward.default, output, q, k, k, None, output, sums,
                seed, seed, dropout, [True, True, True, False],
            )  # fmt: skip


def _flash() -> Iterator[tuple[Any, ...]]:
    shapes = ((2, 4, 4, 256, 256, 32), (1, 8, 2, 1024, 1024, 128), (1, 4, 4, 512, 512, 256), (2, 4, 4, 250, 130, 96),
              (1, 4, 4, 3000, 3000, 64), (1, 2, 2, 512, 4096, 64), (1, 2, 2, 16, 16, 40),
              (4, 32, 8, 512, 512, 128))  # fmt: skip
    for batch, heads, key_heads, queries, keys, width in shapes:
        for transposed in (True, False):

            def made(heads: int, tokens: int, *, transposed=transposed, batch=batch, width=width) -> torch.Tensor:
                if transposed:
                    return _t(batch, tokens, heads, width, dtype=BF16).transpose(1, 2)
                return _t(batch, heads, tokens, width, dtype=BF16)

            q, k = made(heads, queries), made(key_heads, keys)
            yield aten._scaled_dot_product_flash_attention.default, q, k, k, 0.0, queries == keys
            yield (
                aten._scaled_dot_product_flash_attention_backward.default, q, q, k, k, q, _t(batch, heads, queries),
                None, None, queries, keys, 0.0, queries == keys, torch.empty(2, dtype=torch.uint64, device="meta"),
                torch.empty((), dtype=torch.uint64, device="meta"),
            )  # fmt: skip
        yield aten._scaled_dot_product_flash_attention.default, q, k, k, 0.1, queries == keys


def _sorts_and_indices(count: int) -> Iterator[tuple[Any, ...]]:
    places, table = _t(count, dtype=INT), _t(100, 64)
    yield aten.embedding_dense_backward.default, _t(count, 64), places, 100, -1, False
    yield aten.index_put.default, table, [places], _t(count, 64), True
    yield aten.index_put.default, table, [places], _t(count, 64), False
    for dtype in (F32, BF16, INT):
        yield aten.sort.default, _t(count, dtype=dtype)
        yield aten.cumsum.default, _t(count, dtype=dtype), 0
    yield aten.sort.default, _t(4, count)
    yield aten.cumsum.default, _t(4, count), -1
    yield aten.cumsum.default, _t(4, count, dtype=torch.bool), -1
    if count >= 8:
        yield aten.topk.default, _t(count // 8, 8), 2


def signatures_of_calls() -> Iterator[dict[str, Any]]:
    """Of the calls on a device."""
    for func, *args in calls():
        yield json.loads(json.dumps(describe(func, args, {})).replace('"meta"', '"cuda"'))


def counted_bytes(signature: dict[str, Any]) -> int | None:
    """What the op takes beyond what it makes; libraries have their workspaces already. None: it does not run here."""
    func, args, kwargs = rebuild(signature, "cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        with torch.no_grad():
            output = func(*args, **kwargs)
    except RuntimeError:
        return None
    peak, left = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del output
    return max(0, peak - max(0, left))


def take_blas_workspaces() -> None:
    """Which the first product takes and keeps."""
    for dtype in (F32, BF16):
        torch.mm(*(torch.ones(8, 8, dtype=dtype, device="cuda") for _ in range(2)))


def main() -> int:
    if not torch.cuda.is_available():
        print("this PyTorch finds no CUDA device", file=sys.stderr)
        return 2
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # a block is what was asked for
    torch.backends.cudnn.enabled = False  # what it takes nobody tells
    take_blas_workspaces()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    name = torch.cuda.get_device_name()
    device = next((d for d in ("h100", "a100", "l4") if d in name.lower()), name)
    signatures = list(signatures_of_calls())
    known[device] = {
        "torch": torch.__version__,
        "bytes": [counted_bytes(signature) for signature in signatures],
    }
    known["calls"] = signatures
    RESULTS.write_text(as_text(known))
    print(device, len(signatures))
    return 0


def as_text(known: dict[str, Any]) -> str:
    """A call a line."""
    lines = ",\n".join(f"  {json.dumps(signature)}" for signature in known["calls"])
    rest = "".join(f',\n "{name}": {json.dumps(known[name])}' for name in sorted(known) if name != "calls")
    return f'{{\n "calls": [\n{lines}\n ]{rest}\n}}\n'


if __name__ == "__main__":
    sys.exit(main())
