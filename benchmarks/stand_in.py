"""Whether PyTorch's CUDA runs on a stand-in for a GPU, and what that has counted. No time of one is a GPU's."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

_UUID = b"standin"  # how that of a stand-in's device begins


@dataclass(frozen=True)
class Counted:
    """Since the process began: kernels launched, and how often the host waited for the device."""

    launches: int
    waits: int


def is_cuda_stand_in() -> bool:
    """Whether the CUDA device of this process is none."""
    package = sys.modules.get("cuda_standin")
    if package is not None and package.is_loaded():
        return True
    import torch

    if not torch.cuda.is_available():
        return False
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return uuid is not None and bytes(uuid.bytes).startswith(_UUID)


def counted() -> Counted:
    """What the stand-in has counted. Raises: OSError, AttributeError: there is none."""
    package = sys.modules.get("cuda_standin")
    if package is not None and package.is_loaded():
        found = package.counters()
        return Counted(found.launches, found.waits)
    runtime = ctypes.CDLL("libcudart.so.13")
    for name in ("standin_launches", "standin_syncs"):
        getattr(runtime, name).restype = ctypes.c_ulonglong
    return Counted(runtime.standin_launches(), runtime.standin_syncs())
