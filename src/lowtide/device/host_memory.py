"""The bytes of host memory that can still be allocated."""

import ctypes
from pathlib import Path

import psutil

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]


def available_host_bytes() -> int:
    """Return the bytes that PyTorch can still allocate on the CPU now.

    The least of: RAM available without swapping, what the control groups (v1 or v2) leave, what the address-space
    limit leaves; plus what malloc holds unused.
    """
    limits = [psutil.virtual_memory().available, cgroup_available_bytes()]
    if resource is not None and (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        limits.append(limit - psutil.Process().memory_info().vms)
    return max(0, min(left for left in limits if left is not None)) + unused_heap_bytes()


class _Mallinfo2(ctypes.Structure):
    """What glibc's function returns; ``free`` is its ``fordblks``."""

    _fields_ = (("others", ctypes.c_size_t * 8), ("free", ctypes.c_size_t), ("last", ctypes.c_size_t))


def unused_heap_bytes() -> int:
    """Return what this process has freed and malloc keeps for it; 0 where the C library does not tell (not glibc).

    After a step on CPU that may be most of what the step took: tensors below 32 MiB lie on the heap.
    """
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return 0
    mallinfo2.restype = _Mallinfo2
    return int(mallinfo2().free)


def cgroup_available_bytes(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return limit less usage of the tightest control group around this process; None where none has a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_name, usage_name, cache = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit_name, usage_name = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        # Every ancestor's limit holds too. Inside a container the path may not exist below its own mount.
        for folder in (group, *group.parents):
            if folder != root and root not in folder.parents:
                break
            limit, usage = _read_count(folder / limit_name), _read_count(folder / usage_name)
            if limit is not None and usage is not None:
                # Cold file cache is given back before anything is killed.
                left.append(limit - usage + (_read_count(folder / "memory.stat", cache) or 0))
    return min(left, default=None)


def _read_count(path: Path, key: str = "") -> int | None:
    """The number in a file, or in its line that begins with ``key``."""
    try:
        text = path.read_text()
        return int(dict(line.split(maxsplit=1) for line in text.splitlines())[key] if key else text)
    except (OSError, ValueError, KeyError):  # not there, or the word "max"
        return None
