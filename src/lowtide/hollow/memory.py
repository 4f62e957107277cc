"""Hollow tensors: plain CPU tensors of any size, with storages of their own and no memory under them.

Type, device, storage identity, versions and lifetimes are those of any CPU tensor, so code that watches tensors needs
no change. A storage begins somewhere in one range of addresses that is reserved and never filled: a read finds zeros,
and a stray write lands in pages that nothing else uses. No two live storages begin at the same address.

``torch._C._construct_storage_from_data_pointer`` is private; ``tests/hollow/test_memory.py`` pins what it does here.
"""

import ctypes
import itertools
import mmap
from collections.abc import Sequence
from functools import cache

import torch

from lowtide.errors import UnsupportedModelError
from lowtide.measurement.op_inputs import span

_RANGE_BYTES = (1 << 42, 1 << 40, 1 << 36, 1 << 32)  # the first that the process may reserve
_STEP_BYTES = 64  # storages overlap: only where they begin differs
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_CPU = torch.device("cpu")
_numbers = itertools.count()

# Where the values of a solid storage come from, an attribute of the storage.
UNKNOWN = "values that nobody has"
DRAWN = "a random draw"


@cache
def _range() -> tuple[int, int, mmap.mmap]:
    """First address, where storages may begin (bytes from there), and the reservation itself."""
    for size in _RANGE_BYTES:
        try:
            reserved = mmap.mmap(
                -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )  # fmt: skip
        except (OSError, ValueError, AttributeError):
            continue
        return ctypes.addressof(ctypes.c_char.from_buffer(reserved)), size // 64, reserved
    raise UnsupportedModelError(
        "this system reserves no addresses without memory, which tracing without memory needs.\n"
        "Trace on the device itself: leave device= out."
    )


def hollow(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, storage_bytes: int | None = None
) -> torch.Tensor:
    """A tensor without memory; a real one where it has no bytes."""
    count = span(size, stride) * dtype.itemsize if storage_bytes is None else storage_bytes
    if count == 0:
        return torch.empty_strided(size, stride, dtype=dtype, device=_CPU)
    first, window, _ = _range()
    address = first + next(_numbers) * _STEP_BYTES % window
    storage = torch._C._construct_storage_from_data_pointer(address, _CPU, count)
    return torch.empty(0, dtype=dtype, device=_CPU).set_(storage, 0, size, stride)


def hollow_like(tensor: torch.Tensor) -> torch.Tensor:
    """A dense hollow tensor with the spec of ``tensor``, whatever device that is on."""
    with torch.no_grad():
        spec = torch.empty_like(tensor.detach(), device="meta")
        return hollow(spec.shape, spec.stride(), spec.dtype)


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether there is no memory under ``tensor``."""
    try:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, functorch, fake
        return False
    first, window, _ = _range()
    return 0 <= address - first < window and storage.nbytes() > 0


def origin_of(tensor: torch.Tensor) -> str:
    """Why the values of ``tensor`` are not those of a real step (``UNKNOWN``, ``DRAWN``); "" if they are."""
    if is_hollow(tensor):
        return UNKNOWN
    try:
        return getattr(tensor.untyped_storage(), "_lowtide_origin", "")
    except (NotImplementedError, RuntimeError):
        return ""


def mark_on_host(tensor: torch.Tensor) -> None:
    """On the device that is planned for, ``tensor`` lies in host memory and takes none of the device's."""
    tensor.untyped_storage()._lowtide_on_host = True


def is_on_host(storage: torch.UntypedStorage) -> bool:
    """Whether ``mark_on_host`` was told so."""
    return getattr(storage, "_lowtide_on_host", False)


def mark_origin(tensor: torch.Tensor, origin: str) -> None:
    """The values of a solid ``tensor`` are ``origin``."""
    tensor.untyped_storage()._lowtide_origin = origin
