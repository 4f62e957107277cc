"""Files that lowtide keeps from run to run: where they are, and how they are written and read.

A file is there as a whole or not at all, whoever writes at the same time. Only its owner can read and write it, and one
that somebody else could have written is not believed.
"""

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """``$LOWTIDE_CACHE_DIR``, else ``lowtide`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. It need not exist."""
    if own := os.environ.get("LOWTIDE_CACHE_DIR", ""):
        return Path(os.path.abspath(os.path.expanduser(own)))
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The standard says to ignore a path that is not absolute.
    return Path(home if os.path.isabs(home) else os.path.expanduser("~/.cache")) / "lowtide"


def write_file(path: Path, data: bytes) -> None:
    """Replace ``path`` by a file that holds ``data`` (mode 0600; directories that are made on the way 0700).

    Raises:
        OSError: the file system's own; the old file is then still there.
    """
    # mkdir gives the mode to the last directory only.
    for folder in [f for f in (path.parent, *path.parent.parents) if not f.exists()][::-1]:
        folder.mkdir(mode=0o700, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=f"{path.stem}-", suffix=".new", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as written:
            written.write(data)
        # A process that reads meanwhile sees the old file or the new one, never a part.
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def keep_newest(folder: Path, most_files: int) -> None:
    """Drop the files of ``folder`` that were used least recently, until so many are left.

    Raises:
        OSError: the file system's own, if there is no such folder for example.
    """
    # All files, so that what a writer left that was killed goes too.
    ages = []
    for file in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another process drops too
            ages.append((file.stat(follow_symlinks=False).st_mtime_ns, file.path))
    for _, name in sorted(ages)[: max(len(ages) - most_files, 0)]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def read_file(path: Path) -> bytes:
    """The content of ``path``.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: another user owns it or may write to it; the message says which.
        OSError: the file system's own.
    """
    # What is checked is what is read: the path may name another file by then, a link any file.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{path} has mode {stat.S_IMODE(found.st_mode):04o}: others may write to it")
        return file.read()
