"""The scratch file of the disk tier: unlinked while open, so it disappears with the process, however that ends."""

import os
import shutil
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
    left = shutil.disk_usage(path).free
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


def file_system(path: str | Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system that ``path`` is on; "" if it is not known."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    kinds = {}  # a later mount at the same place hides the earlier one
    for line in lines:
        _, where, kind, *_ = line.split(" ")
        kinds[Path(where.encode().decode("unicode_escape"))] = kind  # a blank in a path is escaped as \040
    real = Path(path).resolve()
    return next((kinds[place] for place in (real, *real.parents) if place in kinds), "")


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write the bytes of ``data`` to ``offset``. Raises: OSError: the file system's own."""
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def read_all(fd: int, into: memoryview, offset: int) -> None:
    """Fill the bytes of ``into`` from ``offset``. Raises: OSError: also where the file ends too early."""
    while into:
        done = os.preadv(fd, [into], offset)
        if done == 0:
            raise OSError(f"the file ends at byte {offset}, {len(into)} bytes too early")
        into, offset = into[done:], offset + done
