"""The scratch file of the disk tier: unlinked while open, so it disappears with the process, however that ends."""

import ctypes
import os
import tempfile
import warnings
from pathlib import Path

from lowtide.errors import TierError
from lowtide.units import format_bytes


class ScratchInMemoryWarning(UserWarning):
    """The scratch directory is on a file system in memory: moving tensors there frees none."""


def open_scratch(directory: str | Path | None, need_bytes: int = 0) -> int:
    """Return a file descriptor of a new file without a name.

    Args:
        directory: None: the system's directory for temporary files.
        need_bytes: Least bytes that must be free there.

    Raises:
        TierError: the directory is missing, is no directory, cannot be written, or has less than ``need_bytes`` free.

    Warns:
        ScratchInMemoryWarning: it is on a file system that is held in memory.
    """
    path = Path(tempfile.gettempdir() if directory is None else directory)
    try:
        fd, name = tempfile.mkstemp(prefix="lowtide-", dir=path)
    except OSError as error:
        raise TierError(
            f"scratch_dir={str(path)!r} cannot hold a scratch file: {error.strerror or error}.\n"
            "Pass a directory that exists and can be written, with scratch_dir=."
        ) from error
    os.unlink(name)
    left = free_bytes(path)
    if left < need_bytes:
        os.close(fd)
        raise TierError(
            f"scratch_dir={str(path)!r} has {format_bytes(left)} free, the plan moves {format_bytes(need_bytes)} there."
            "\nMake room, pass another directory with scratch_dir=, or lower disk_budget= and plan again."
        )
    kind = file_system(path)
    if kind in ("tmpfs", "ramfs"):
        warnings.warn(
            f"scratch_dir={str(path)!r} is on {kind}, which is memory: what is moved there frees none. "
            "Pass a directory on a disk.",
            ScratchInMemoryWarning,
            stacklevel=3,
        )
    return fd


def free_bytes(path: str | Path) -> int:
    """Bytes that an ordinary user may still write to the file system of ``path``."""
    return (found := os.statvfs(path)).f_bavail * found.f_frsize


def file_system(path: str | Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system that ``path`` is on; "" if it is not known."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    real, best, found = Path(path).resolve(), -1, ""
    for line in lines:
        _, where, kind, *_ = line.split(" ")
        mount = Path(where.encode().decode("unicode_escape"))  # a blank in a path is escaped as \040
        if (real == mount or mount in real.parents) and len(mount.parts) >= best:
            best, found = len(mount.parts), kind
    return found


def write_all(fd: int, address: int, size: int, offset: int) -> None:
    """Write ``size`` bytes of memory at ``address`` to ``offset``. Raises: OSError: the file system's own."""
    view, done = bytes_at(address, size), 0
    while done < size:
        done += os.pwrite(fd, view[done:], offset + done)


def read_all(fd: int, address: int, size: int, offset: int) -> None:
    """Read ``size`` bytes at ``offset`` into memory at ``address``. Raises: OSError: also where it ends too early."""
    view, done = bytes_at(address, size), 0
    while done < size:
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise OSError(f"the file ends at byte {offset + done}, {size - done} bytes too early")
        done += count


def bytes_at(address: int, size: int) -> memoryview:
    """Memory as a buffer; its owner must keep the memory alive as long as the buffer."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
