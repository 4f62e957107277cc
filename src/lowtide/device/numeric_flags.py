"""The global flags that decide an op's bits, and those that decide which kernel attention takes.

TF32, reduced precision and cuDNN's are CUDA's alone; elsewhere they stay as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def numeric_flags() -> tuple[Any, ...]:
    # The C functions under torch.backends and torch.are_deterministic_algorithms_enabled(): this runs for each burst.
    return (
        torch.get_num_threads(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
        torch._C._get_float32_matmul_precision(),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
        torch._C._get_cudnn_allow_tf32(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
    )


def set_numeric_flags(flags: tuple[Any, ...]) -> None:
    threads, deterministic, warn_only, precision, fp16, bf16, sums, tf32, benchmark, cudnn_deterministic = flags
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    if precision != torch.get_float32_matmul_precision():
        torch.set_float32_matmul_precision(precision)
    products: Any = torch.backends.cuda.matmul
    products.allow_fp16_reduced_precision_reduction = fp16
    products.allow_bf16_reduced_precision_reduction = bf16
    products.allow_fp16_accumulation = sums
    torch.backends.cudnn.allow_tf32 = tf32
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
