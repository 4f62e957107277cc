"""What a CUDA device would run, on hollow CPU tensors.

Autograd, engine and Python stay on the CPU. What differs above autograd (which attention, dropout with a mask, fused
norms, the lists of autocast) is put in as kernels of the CPU's autograd and autocast keys. What differs below, how
outputs look, comes from fake kernels (``output_specs.py``). The kernels hold for the whole process while the
context is open.

Nothing here has met a GPU. Attention: ``cuda_attention.py``. Autocast: ``ATen/autocast_mode.h``;
``tests/hollow/test_cuda_kernels.py`` compares the lists with the installed PyTorch's.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.library import Library

from lowtide.hollow.cuda_attention import attention

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
# Cast their inputs to float32.
AUTOCAST_FLOAT32 = [
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "dist",
    "pdist", "renorm", "logsumexp", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
]  # fmt: skip
# Ask for a float32 result instead.
AUTOCAST_FLOAT32_RESULT = [
    "cumprod", "cumsum", "sum", "sum.dim_IntList", "softmax.int", "log_softmax.int", "linalg_vector_norm",
]  # fmt: skip
# The CPU's autocast casts them, CUDA's leaves them alone.
NOT_IN_CUDA_AUTOCAST = [
    "cat", "stack", "cross_entropy_loss", "adaptive_avg_pool3d", "avg_pool3d", "polar", "index_copy",
]  # fmt: skip


@contextmanager
def cuda_kernels(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, CPU tensors go through the kernels of a CUDA device; they have to be hollow."""
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that operators are overridden
            _put_in(library, capability)
        yield
    finally:
        library._destroy()


def _put_in(library: Library, capability: tuple[int, int]) -> None:
    library.impl("scaled_dot_product_attention", attention(capability), "AutogradCPU")
    library.impl("dropout", _dropout, "AutogradCPU")
    library.impl("rms_norm", _rms_norm, "AutogradCPU")
    for name in ("_fused_rms_norm", "_fused_rms_norm_backward"):  # else autograd has no formula of them
        library.impl(name, _never, "CPU")
    for name in NOT_IN_CUDA_AUTOCAST:
        library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True)
    for name in (*AUTOCAST_FLOAT32, *AUTOCAST_FLOAT32_RESULT):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        wrapped = _asking_float32(op) if name in AUTOCAST_FLOAT32_RESULT else _in_float32(op)
        library.impl(name, wrapped, "AutocastCPU", allow_override=True)


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0:
        return x
    return aten.native_dropout(x, p, train)[0] if p < 1 else x * x.new_zeros(())


def _rms_norm(x: torch.Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> torch.Tensor:
    return aten._fused_rms_norm(x, shape, weight, eps)[0]


def _never(*_: Any) -> Any:
    raise AssertionError("a kernel that only CUDA has was run")


def _in_float32(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return op(*map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()})

    return run


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


def _asking_float32(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            asked = kwargs.get("dtype") is not None or any(isinstance(a, torch.dtype) for a in args)
            if not asked and next(a for a in args if isinstance(a, torch.Tensor)).dtype in _HALF:
                kwargs = {**kwargs, "dtype": torch.float32}
            return op(*args, **kwargs)

    return run
