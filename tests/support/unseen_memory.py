"""Memory of tensors as kernels of other libraries see it: no dispatcher, no version counter, no mode is told.

The host reads and writes memory of its own, of the tests' accelerator and of the CUDA stand-in. That of a GPU it copies
with CUDA's runtime, and whatever is written goes back at once.
"""

import ctypes
import functools
from typing import Any

import numpy as np
import torch
from support.gpu import is_gpus


def is_within_reach(tensor: torch.Tensor) -> bool:
    """Whether the host can read and write the tensor's memory where it is."""
    return not is_gpus(tensor.device)


def address_of(tensor: torch.Tensor) -> int:
    """Where the host reads and writes it. Work that was queued on its device has run."""
    if tensor.device.type == "cpu":
        return tensor.data_ptr()
    assert is_within_reach(tensor)
    torch.accelerator.synchronize(tensor.device)
    if tensor.device.type == "cuda":  # on the stand-in, whose memory is the host's
        return tensor.data_ptr()
    from accelerator import device  # building it takes a compiler

    return device.host_address(tensor.data_ptr()) or 0


def finish_work() -> None:
    """Wait for the default device. A kernel that refuses its operands says so then, not when it is called."""
    if torch.get_default_device().type != "cpu":
        torch.accelerator.synchronize()


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a tensor on any device. Use it at once: it keeps nothing alive and waits for no later work.

    Write by assignment alone (``memory_of(t)[...] = values``): what else fills an array is not seen to do so.
    """
    return tensor.detach().numpy() if tensor.device.type == "cpu" else memory_at(tensor)


def memory_at(tensor: torch.Tensor) -> np.ndarray:
    """As ``memory_of``, by address on a CPU too: what NumPy has been given can no longer be resized."""
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), dtype)
    strides = [s * dtype.itemsize for s in tensor.stride()]
    if is_within_reach(tensor):
        buffer = (ctypes.c_char * (reach * dtype.itemsize)).from_address(address_of(tensor))
        return np.ndarray(tuple(tensor.shape), dtype, buffer, strides=strides)
    copy = CopyOfMemory(tensor.device, tensor.data_ptr(), reach * dtype.itemsize)
    found = np.ndarray(tuple(tensor.shape), dtype, copy.bytes, strides=strides).view(_WritesThrough)
    found.copy_of_memory = copy
    return found


class CopyOfMemory:
    """``size`` bytes of a GPU from ``address`` on, as they were when this was made.

    Attributes:
        bytes: The copy. What is written into it is on the GPU after ``put_back``.
    """

    def __init__(self, device: torch.device, address: int, size: int) -> None:
        self._device, self._address, self._size = device, address, size
        self.bytes = ctypes.create_string_buffer(size)
        torch.accelerator.synchronize(device)
        _copy(ctypes.addressof(self.bytes), address, size)
        self._before = self.bytes.raw

    def put_back(self) -> None:
        """Nothing goes back where nothing was written: another copy of the same memory may have been."""
        if self.bytes.raw != self._before:
            _copy(self._address, ctypes.addressof(self.bytes), self._size)
            torch.accelerator.synchronize(self._device)
            self._before = self.bytes.raw


def _copy(to: int, source: int, size: int) -> None:
    error = _runtime().cudaMemcpy(ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(size), _BY_ADDRESS)
    if error:
        raise RuntimeError(f"cudaMemcpy: error {error}")


_BY_ADDRESS = 4  # cudaMemcpyDefault: from where to where is read off the addresses


@functools.cache
def _runtime() -> ctypes.CDLL:
    """The one that PyTorch has loaded."""
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")


class _WritesThrough(np.ndarray):
    """An array over a copy of a GPU's memory: what is assigned to it, or to a part of it, arrives there."""

    copy_of_memory: CopyOfMemory | None = None

    def __array_finalize__(self, obj: Any) -> None:
        # Parts of it share its bytes; results of operations do not.
        self.copy_of_memory = getattr(obj, "copy_of_memory", None) if self.base is not None else None

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if self.copy_of_memory is not None:
            self.copy_of_memory.put_back()
