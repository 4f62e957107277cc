"""Memory that lies in pieces between blocks in use, made whole: the blocks go to host memory and come back together.

An allocator cuts small requests from segments and keeps a segment as long as one block of it is in use. So a device may
have enough free memory for a tensor and no place for it. Storages keep their identity when they move: tensors and views
over them find their memory anew.
"""

from collections.abc import Iterable

import torch

from lowtide.device.host_memory import available_host_bytes
from lowtide.device.memory import release_cached_memory
from lowtide.device.names import is_accelerator
from lowtide.device.streams import synchronize

_MOST_OF_HOST = 0.5  # of its available memory


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
    if not moved or (host_bytes is not None and sum(sizes) > _MOST_OF_HOST * host_bytes):
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
        for storage, size in zip(moved, sizes):
            storage.resize_(size)
        for storage, copy in zip(moved, copies):
            storage.copy_(copy)
    return True
