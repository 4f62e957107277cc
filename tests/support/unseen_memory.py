"""Memory of tensors as kernels of other libraries see it: no dispatcher, no version counter, no mode is told."""

import ctypes

import numpy as np
import torch


def address_of(tensor: torch.Tensor) -> int:
    """Where the host reads and writes it. Work that was queued on its device has run."""
    if tensor.device.type == "cpu":
        return tensor.data_ptr()
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
    """The memory of a tensor on any device. Use it at once: it keeps nothing alive and waits for no later work."""
    if tensor.device.type == "cpu":
        return tensor.detach().numpy()
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), dtype)
    buffer = (ctypes.c_char * (reach * dtype.itemsize)).from_address(address_of(tensor))
    return np.ndarray(tuple(tensor.shape), dtype, buffer, strides=[s * dtype.itemsize for s in tensor.stride()])
