"""The global flags that decide an op's bits, and those that decide which kernel attention takes.

TF32, reduced precision and cuDNN's are CUDA's alone; elsewhere they stay as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Products, convolutions and recurrent layers of float32 have a precision each. Where a script sets one of them, PyTorch
# raises as soon as somebody reads the older flags (``torch.get_float32_matmul_precision()``).
_PRODUCTS, _CONVOLUTIONS, _ON_CPU = ("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul")
_PRECISIONS = _PRODUCTS, _CONVOLUTIONS, ("cuda", "rnn"), _ON_CPU, ("mkldnn", "conv"), ("mkldnn", "rnn")


def numeric_flags() -> tuple[Any, ...]:
    # The C functions under torch.backends and torch.are_deterministic_algorithms_enabled(): this runs for each burst.
    return (
        torch.get_num_threads(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
        _float32_precisions(),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
    )


def _float32_precisions() -> tuple[str, ...]:
    return tuple([torch._C._get_fp32_precision_getter(backend, op) for backend, op in _PRECISIONS])


def _set_float32_precisions(precisions: tuple[str, ...]) -> None:
    """The older flags first, which set the newer ones too: PyTorch wants both to say the same."""
    wanted = dict(zip(_PRECISIONS, precisions, strict=True))
    now = dict(zip(_PRECISIONS, _float32_precisions(), strict=True))
    if wanted[_PRODUCTS] != now[_PRODUCTS]:
        lower = "medium" if wanted[_ON_CPU] == "bf16" else "high"
        torch.set_float32_matmul_precision(lower if wanted[_PRODUCTS] == "tf32" else "highest")
    if wanted[_CONVOLUTIONS] != now[_CONVOLUTIONS]:
        torch.backends.cudnn.allow_tf32 = wanted[_CONVOLUTIONS] == "tf32"
    for (backend, op), precision in wanted.items():
        if torch._C._get_fp32_precision_getter(backend, op) != precision:
            torch._C._set_fp32_precision_setter(backend, op, precision)


def set_numeric_flags(flags: tuple[Any, ...]) -> None:
    threads, deterministic, warn_only, precisions, fp16, bf16, sums, benchmark, cudnn_deterministic = flags
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    _set_float32_precisions(precisions)
    products: Any = torch.backends.cuda.matmul
    products.allow_fp16_reduced_precision_reduction = fp16
    products.allow_bf16_reduced_precision_reduction = bf16
    products.allow_fp16_accumulation = sums
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.deterministic = cudnn_deterministic


@contextmanager
def with_numeric_flags(flags: tuple[Any, ...]) -> Iterator[None]:
    """Inside, the flags are these; afterwards, the present ones again."""
    now = numeric_flags()
    if now == flags:
        yield
        return
    set_numeric_flags(flags)
    try:
        yield
    finally:
        set_numeric_flags(now)


def attention_flags() -> tuple[bool, ...]:
    """Which kernels of attention may run, on any device."""
    here = torch.backends.cuda
    return here.flash_sdp_enabled(), here.mem_efficient_sdp_enabled(), here.math_sdp_enabled(), here.cudnn_sdp_enabled()


@contextmanager
def with_attention_flags(flags: tuple[bool, ...]) -> Iterator[None]:
    """Inside, these kernels of attention may run; afterwards, the present ones again."""
    now = attention_flags()
    _enable(flags)
    try:
        yield
    finally:
        _enable(now)


def _enable(flags: tuple[bool, ...]) -> None:
    here = torch.backends.cuda
    switches = here.enable_flash_sdp, here.enable_mem_efficient_sdp, here.enable_math_sdp, here.enable_cudnn_sdp
    for switch, enabled in zip(switches, flags, strict=True):
        switch(enabled)
