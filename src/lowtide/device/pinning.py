"""Host memory that a device copies from and to while it computes.

On CUDA memory is registered as it is. PyTorch's own pinned allocator, which other devices get theirs from, rounds up to
powers of two.
"""

from contextlib import suppress
from typing import Any

import torch

from lowtide.device.names import accelerator_type
from lowtide.device.streams import synchronize_all

_PAGE = 1 << 12
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class PinningError(RuntimeError):
    """The system gives no pinned memory, or not so much. The message is the device's reason."""


def host_buffer(size: int) -> torch.Tensor:
    """Uninitialised bytes of host memory, whatever the default device is."""
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def pinned_buffer(size: int) -> torch.Tensor:
    """``size`` pinned bytes, uninitialised; ``unpin`` gives them back. Raises: PinningError."""
    if accelerator_type() == "cuda":
        return _registered(size)
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        raise PinningError(str(error).splitlines()[0]) from error


def unpin(buffers: list[torch.Tensor]) -> None:
    """Give back what ``pinned_buffer`` gave, after all copies that still run."""
    if buffers:
        synchronize_all()
    if accelerator_type() == "cuda":
        for buffer in buffers:
            cudart().cudaHostUnregister(buffer.data_ptr())


# CUDA's alone, from here on.


def cudart() -> Any:
    return torch.cuda.cudart()


def _registered(size: int) -> torch.Tensor:
    # Pages of its own: a page can be registered once only.
    memory = host_buffer(size + _PAGE)
    begin = -memory.data_ptr() % _PAGE
    memory = memory[begin : begin + size]
    code = int(cudart().cudaHostRegister(memory.data_ptr(), size, _PORTABLE))
    if code:
        _clear_error()
        raise PinningError(f"CUDA error {code}")
    return memory


def _clear_error() -> None:
    """A failed registration leaves an error behind that the next kernel would report."""
    clear = getattr(cudart(), "cudaGetLastError", None)  # missing in some versions of torch
    if clear is not None:
        clear()
        return
    with suppress(RuntimeError, AssertionError):  # AssertionError: torch without CUDA
        torch.ones(1, device="cuda")  # reports the error, and so clears it
