"""``scaled_dot_product_attention`` as a CUDA device runs it: which kernel, and what it is given.

The choice follows ``ATen/native/transformers/cuda/sdp_utils.cpp`` of PyTorch 2.13 to 2.15. The tests compare it with
PyTorch's own over all combinations (``benchmarks/results/attention_choices.json``).

Known weakness: on compute capability 9.0 and 10.0 PyTorch may prefer cuDNN's attention, where cuDNN is newer than 9.15.
It counts as flash attention here; what it needs inside itself is not known.
"""

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_FLASH_WIDTH = 256  # the widest head of flash attention
_MASK_ALIGNMENT = 8  # elements
# Flash attention has too little shared memory there for the backward of wide heads.
_LITTLE_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))


def torch_release() -> tuple[int, int]:
    """Major and minor number of the installed PyTorch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def attention_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any,
    capability: tuple[int, int],
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    release: tuple[int, int] | None = None,
) -> str:
    """``flash``, ``efficient`` or ``math``, as PyTorch chooses.

    Args:
        capability: Compute capability of the device.
        release: Of PyTorch; None: the installed one.
    """
    release = release or torch_release()
    if not (q.dim() == k.dim() == v.dim() == 4) or not q.shape[0] == k.shape[0] == v.shape[0]:
        return "math"
    heads, key_heads = q.shape[1], k.shape[1]
    grouped = heads != key_heads
    if key_heads != v.shape[1] or heads % key_heads:
        return "math"
    if grouped and not enable_gqa and not (key_heads == 1 and release >= (2, 14)):
        return "math"
    if _takes_flash(q, k, v, mask, capability, dropout_p, is_causal):
        return "flash"
    if _is_efficient_type(q.dtype, capability) and (not grouped or release >= (2, 14)):
        step = _efficient_alignment(q.dtype, capability)
        if q.shape[-1] % step == 0 and v.shape[-1] % step == 0:
            return "efficient"
    return "math"


def _takes_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, capability: tuple[int, int], dropout_p: float,
    is_causal: bool,
) -> bool:  # fmt: skip
    width = q.shape[-1]
    if q.dtype not in _HALF or mask is not None or capability < (8, 0) or width != v.shape[-1] or width > _FLASH_WIDTH:
        return False
    if is_causal and q.shape[-2] != k.shape[-2]:
        return False
    too_wide = 192 < width <= 224 or (width > 224 and dropout_p > 0)
    return not (too_wide and capability in _LITTLE_SHARED_MEMORY and _trains(q, k, v))


def _is_efficient_type(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    return dtype in (torch.float32, torch.float16) or (dtype == torch.bfloat16 and capability >= (8, 0))


def _efficient_alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Heads are multiples of so many elements: 16 bytes, where tensor cores multiply."""
    has_tensor_cores = capability >= (8, 0) or (dtype in _HALF and capability >= (7, 0))
    return 16 // dtype.itemsize if has_tensor_cores else 1


def _trains(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def attention(capability: tuple[int, int]) -> Callable[..., torch.Tensor]:
    """A kernel for the autograd key in place of ``aten::scaled_dot_product_attention``."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        kernel = attention_kernel(
            q, k, v, attn_mask, capability, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa
        )
        if kernel == "math":
            found = aten._scaled_dot_product_attention_math(
                q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return found[0]
        if kernel == "flash":
            width = q.shape[-1]
            if missing := -width % 8:
                q, k, v = (torch.nn.functional.pad(t, (0, missing)) for t in (q, k, v))
            scale = width**-0.5 if scale is None else scale
            found = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)
            return found[0][..., :width] if missing else found[0]
        if attn_mask is not None:
            attn_mask = _aligned_bias(attn_mask, q, k)
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, _trains(q, k, v), dropout_p, is_causal, scale=scale
        )[0]

    return attend


def _aligned_bias(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A mask as the kernel takes it: added numbers, rows padded to 8 elements."""
    if mask.dtype == torch.bool:
        hidden, seen = (torch.scalar_tensor(value, dtype=q.dtype) for value in (float("-inf"), 0.0))
        mask = torch.where(mask, seen, hidden)
    tokens = mask.shape[-1]
    if missing := -tokens % _MASK_ALIGNMENT:
        mask = torch.nn.functional.pad(mask, (0, missing))[..., :tokens]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
