"""The global flags that decide an op's bits. TF32 and cuDNN's are CUDA's alone; elsewhere they stay as they are."""

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
        torch._C._get_cudnn_allow_tf32(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
    )


def set_numeric_flags(flags: tuple[Any, ...]) -> None:
    threads, deterministic, warn_only, precision, tf32, benchmark, cudnn_deterministic = flags
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    if precision != torch.get_float32_matmul_precision():
        torch.set_float32_matmul_precision(precision)
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
