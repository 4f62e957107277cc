"""The name of a device, and the bytes that can still be allocated on it."""

import ctypes
import platform
from pathlib import Path

import psutil
import torch

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]


def device_name(device: str | torch.device = "cpu") -> str:
    """Return the model name that ``device`` reports; the machine type where a CPU reports none."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] not in ("", "unknown") else platform.machine() or "cpu"


def available_bytes(device: str | torch.device = "cpu") -> int:
    """Return the bytes that PyTorch can still allocate on ``device`` now.

    On CUDA: free on the device, plus what the caching allocator holds unused. On CPU the least of: RAM available
    without swapping, what the control groups (v1 or v2) leave, what the address-space limit leaves; plus what malloc
    holds unused.
    """
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
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
