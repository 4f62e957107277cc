"""Frees the disk space of GPU code that the stand-in never runs: holes in place of the ``.nv_fatbin`` sections."""

import ctypes
import os
import re
import subprocess
from pathlib import Path

_PUNCH_HOLE_KEEP_SIZE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


def slim(torch_dir: Path) -> int:
    """Bytes of GPU code in the libraries of ``torch_dir`` that are holes now.

    Raises:
        OSError: the file system knows no holes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    freed = 0
    for library in sorted((torch_dir / "lib").glob("*.so")):
        sections = subprocess.run(["readelf", "-SW", str(library)], check=True, text=True, capture_output=True).stdout
        match = re.search(r"\.nv_fatbin\s+PROGBITS\s+[0-9a-f]+ ([0-9a-f]+) ([0-9a-f]+)", sections)
        if match is None:
            continue
        offset, size = (int(number, 16) for number in match.groups())
        with library.open("r+b") as file:
            if libc.fallocate(file.fileno(), _PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(offset), ctypes.c_long(size)):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(library))
        freed += size
    return freed
