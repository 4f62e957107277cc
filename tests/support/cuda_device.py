"""CUDA as default device of the suite: PyTorch's CUDA build on a GPU, or on the stand-in (cuda_standin/README.md)."""

import contextlib
import gc
import os
from collections.abc import Iterator

import torch
from accelerator.schedules import LATE, Policy

import cuda_standin

NAME = "cuda"


def launched() -> int:
    """Kernels so far. A GPU does not count them: what its allocator has handed out."""
    if not cuda_standin.is_loaded():
        # Not of ``torch.accelerator``, for which tests stand something else in. There are none before a first tensor.
        return torch.cuda.memory_stats().get("allocation.all.allocated", 0)
    return cuda_standin.counters().launches


@contextlib.contextmanager
def schedule(default_stream: Policy, other_streams: Policy) -> Iterator[None]:
    """The default streams, and all others, run their work early or late. What is queued runs before and after.

    A GPU's own streams are late by what the work takes.
    """
    if not cuda_standin.is_loaded():
        yield
        return
    which = {(False, False): "", (False, True): "side", (True, False): "default", (True, True): "all"}
    with cuda_standin.run_late(which[default_stream == LATE, other_streams == LATE]):
        yield


@contextlib.contextmanager
def expandable_segments(on: bool) -> Iterator[None]:
    """Whether segments grow from here on; the environment says so too, as where a process starts with the setting."""
    before = os.environ.get("PYTORCH_ALLOC_CONF")
    os.environ["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{on}"
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{on}")
    try:
        yield
    finally:
        del os.environ["PYTORCH_ALLOC_CONF"]
        if before is not None:
            os.environ["PYTORCH_ALLOC_CONF"] = before
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        torch._C._cuda_clearCublasWorkspaces()  # else their growing segment stays, for whoever asks for segments next
        gc.collect()
        torch.cuda.empty_cache()
