"""Memory that lies in pieces between blocks in use, made whole: the blocks go to host memory and come back together.

An allocator cuts small requests from segments and keeps a segment as long as one block of it is in use. So a device may
have enough free memory for a tensor and no place for it. Storages keep their identity when they move: tensors and views
over them find their memory anew. Before they come back, the allocator is made to hold what is free as one segment: for
a tensor of 8 MiB it would else ask the device for 20.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch

from lowtide.device.host_memory import available_host_bytes
from lowtide.device.memory import release_cached_memory, uncounted
from lowtide.device.names import index_of, is_accelerator
from lowtide.device.streams import synchronize
from lowtide.errors import LostMemoryError

_MOST_OF_HOST = 0.5  # of its available memory
_LEAST_SEGMENT_BYTES = 10 << 20  # from here on a segment is as large as what was asked for
_LEFT_BYTES, _LEFT_SHARE = 4 << 20, 1 / 16  # for small blocks and other libraries
_SMALL_BYTES, _SMALL_SEGMENT_BYTES = 1 << 20, 2 << 20  # blocks up to here have segments of their own


def lay_together(storages: Iterable[torch.UntypedStorage], device: torch.device, *, tightly: bool = False) -> bool:
    """Move ``storages`` of ``device`` out and back in, the largest first; whether that was tried.

    The host waits for the device. Nothing moves where host memory is short.

    Args:
        tightly: Leave the device no more than one small segment.

    Raises:
        LostMemoryError: they do not fit any more.
    """
    if not is_accelerator(device):
        return False
    moved = [s for s in storages if s.nbytes() and s.resizable() and torch.device(s.device).type == device.type]
    moved.sort(key=lambda storage: -storage.nbytes())
    sizes = [storage.nbytes() for storage in moved]
    if not fits_on_the_host(sum(sizes)):
        return False
    synchronize(device)
    with torch._C._DisableTorchDispatch(), torch.no_grad():  # no ops of whoever watches this thread
        copies = []
        for storage in moved:
            copies.append(torch.UntypedStorage(storage.nbytes()))
            copies[-1].copy_(storage)
        for storage in moved:
            storage.resize_(0)
        sized = list(zip(moved, sizes))
        if not any(_placed(sized, device, tightly=how) for how in ((True, None) if tightly else (False, True, None))):
            raise LostMemoryError(sum(sizes))
        for storage, copy in zip(moved, copies):
            storage.copy_(copy)
    return True


def _placed(sized: list[tuple[torch.UntypedStorage, int]], device: torch.device, *, tightly: bool | None) -> bool:
    """Whether storages that hold nothing have got memory of these sizes; if not, they hold nothing again.

    Args:
        tightly: As for ``hold_as_one_segment``; None: nothing is held.
    """
    release_cached_memory()
    try:
        # Small ones first: they have segments of their own, and what is free beside these is known then.
        for storage, size in sized:
            if size <= _SMALL_BYTES:
                storage.resize_(size)
        if tightly is not None:
            hold_as_one_segment(device, tightly=tightly)
        for storage, size in sized:
            if size > _SMALL_BYTES:
                storage.resize_(size)
    except Exception:
        for storage, _ in sized:
            storage.resize_(0)
        return False
    return True


@contextmanager
def on_the_host(storage: torch.UntypedStorage) -> Iterator[torch.UntypedStorage]:
    """Inside, what ``storage`` holds is in host memory, and its own is free; afterwards it is back.

    Yields:
        The copy.

    Raises:
        LostMemoryError: there is no place for it any more.
    """
    size, device = storage.nbytes(), torch.device(storage.device)
    synchronize(device)
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        copy = torch.UntypedStorage(size)
        copy.copy_(storage)
        storage.resize_(0)
    try:
        yield copy
    finally:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            if not _placed([(storage, size)], device, tightly=None):
                raise LostMemoryError(size)
            storage.copy_(copy)


def fits_on_the_host(size: int) -> bool:
    """Whether ``size`` bytes may go there for a moment."""
    host_bytes = available_host_bytes()
    return host_bytes is None or size <= _MOST_OF_HOST * host_bytes


def hold_as_one_segment(device: torch.device, *, tightly: bool = False) -> None:
    """Have the allocator keep what is free on ``device`` as one unused block, but for a little.

    Where the device refuses, or does not tell what is free, nothing is held, and nothing is lost by that.
    """
    if not is_accelerator(device):
        return
    with suppress(RuntimeError, NotImplementedError), torch._C._DisableTorchDispatch():
        free, _ = torch.accelerator.get_memory_info(index_of(device))
        size = free - (_SMALL_SEGMENT_BYTES if tightly else max(_LEFT_BYTES, int(_LEFT_SHARE * free)))
        if size >= _LEAST_SEGMENT_BYTES:
            with uncounted(device):
                torch.empty(size >> 21 << 21, dtype=torch.uint8, device=device)
