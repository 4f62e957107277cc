"""Memory that lies in pieces between blocks in use, made whole: the blocks go to host memory and come back together.

An allocator cuts small requests from segments and keeps a segment as long as one block of it is in use. So a device may
have enough free memory for a tensor and no place for it. Storages keep their identity when they move: tensors and views
over them find their memory anew. Before they come back, the allocator is made to hold what is free as one segment: for
a tensor of 8 MiB it would else ask the device for 20.
"""

from collections.abc import Iterable
from contextlib import suppress

import torch

from lowtide.device.host_memory import available_host_bytes
from lowtide.device.memory import release_cached_memory, uncounted
from lowtide.device.names import index_of, is_accelerator
from lowtide.device.streams import synchronize

_MOST_OF_HOST = 0.5  # of its available memory
_LEAST_SEGMENT_BYTES = 10 << 20  # from here on a segment is as large as what was asked for
_LEFT_BYTES, _LEFT_SHARE = 4 << 20, 1 / 16  # for small blocks and other libraries
_SMALL_BYTES = 1 << 20  # blocks up to here have segments of their own


def lay_together(storages: Iterable[torch.UntypedStorage], device: torch.device) -> bool:
    """Move ``storages`` of ``device`` out and back in, the largest first; whether that was tried.

    The host waits for the device. Nothing moves where host memory is short.

    Raises:
        torch.OutOfMemoryError: they do not fit any more. What they held is lost.
    """
    if not is_accelerator(device):
        return False
    moved = [s for s in storages if s.nbytes() and s.resizable() and torch.device(s.device).type == device.type]
    moved.sort(key=lambda storage: -storage.nbytes())
    sizes = [storage.nbytes() for storage in moved]
    host_bytes = available_host_bytes()
    if host_bytes is not None and sum(sizes) > _MOST_OF_HOST * host_bytes:
        return False
    synchronize(device)
    with torch._C._DisableTorchDispatch(), torch.no_grad():  # no ops of whoever watches this thread
        copies = []
        for storage in moved:
            copies.append(torch.UntypedStorage(storage.nbytes()))
            copies[-1].copy_(storage)
        for storage in moved:
            storage.resize_(0)
        release_cached_memory()
        hold_as_one_segment(device, besides=sum(size for size in sizes if size <= _SMALL_BYTES))
        for storage, size in zip(moved, sizes):
            storage.resize_(size)
        for storage, copy in zip(moved, copies):
            storage.copy_(copy)
    return True


def hold_as_one_segment(device: torch.device, besides: int = 0) -> None:
    """Have the allocator keep what is free on ``device`` as one unused block, but for ``besides`` and a little more.

    Where the device refuses, or does not tell what is free, nothing is held, and nothing is lost by that.
    """
    with suppress(RuntimeError, NotImplementedError), torch._C._DisableTorchDispatch():
        free, _ = torch.accelerator.get_memory_info(index_of(device))
        size = free - besides - max(_LEFT_BYTES, int(_LEFT_SHARE * free))
        if size >= _LEAST_SEGMENT_BYTES:
            with uncounted(device):
                torch.empty(size >> 21 << 21, dtype=torch.uint8, device=device)
