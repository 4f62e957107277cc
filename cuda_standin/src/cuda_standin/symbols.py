"""What PyTorch's libraries ask of CUDA's: read from their dynamic sections with readelf and nm.

Nothing is listed by hand, so a PyTorch of another version needs no change: libraries, their numbers and their symbols
are those that this PyTorch names.
"""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

# By the beginning of a symbol that has no version, the library it belongs to; the longer beginning comes first.
_LIBRARY_BY_PREFIX = (
    ("cusparseLt", "libcusparseLt"), ("nccl", "libnccl"), ("cuFile", "libcufile"), ("cupti", "libcupti"),
    ("nvshmem", "libnvshmem_host"), ("cublasLt", "libcublasLt"), ("nvtx", "libnvToolsExt"), ("cudnn", "libcudnn"),
    ("cublas", "libcublas"), ("cusparse", "libcusparse"), ("cusolver", "libcusolver"), ("cufft", "libcufft"),
    ("curand", "libcurand"), ("nvrtc", "libnvrtc"), ("__cuda", "libcudart"), ("cuda", "libcudart"), ("cu", "libcuda"),
)  # fmt: skip
_OF_CUDA = re.compile(
    r"(__cuda|cu[A-Z]|cuda|cublas|cusolver|cusparse|cufft|curand|cudnn|nvrtc|nccl|nvshmem|cupti|nvtx)"
)
_LIBRARY_OF_CUDA = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvToolsExt|nvJitLink)")
_NVML = (
    "nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetComputeRunningProcesses",
    "nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetGpuFabricInfoV",
)  # fmt: skip


def stem(soname: str) -> str:
    """``libcudart`` of ``libcudart.so.13``."""
    return soname.split(".so")[0]


def needed(torch_dir: Path, others: Iterable[Path] = ()) -> dict[str, dict[str, str | None]]:
    """By library (``libcudart.so.13``), the symbols that PyTorch and ``others`` leave undefined, and their versions."""
    folder = torch_dir / "lib"
    libraries = sorted(folder.glob("lib*.so*"))
    wanted: dict[str, dict[str, str | None]] = {"libcuda.so.1": {}, "libnvidia-ml.so.1": dict.fromkeys(_NVML)}
    loose: dict[str, str | None] = {}
    inside: set[str] = set()  # PyTorch 2.2 to 2.5 bring cusparseLt with them
    for library in [*libraries, *others]:
        for line in _run("readelf", "-d", library):
            match = re.search(r"NEEDED.*\[(.*)\]", line)
            if match and _LIBRARY_OF_CUDA.match(match[1]) and not (folder / match[1]).exists():
                wanted.setdefault(match[1], {})
        for name in _names(library, "--undefined-only"):
            symbol, _, version = name.partition("@")
            version = version.lstrip("@")
            if not _OF_CUDA.match(symbol):
                continue
            if ".so" in version:
                wanted.setdefault(version, {})[symbol] = version
            else:
                loose[symbol] = version or None
        inside |= {name.partition("@")[0] for name in defined_dynamic(library)}
    by_stem = {stem(soname): soname for soname in wanted}
    for symbol, version in loose.items():
        library_stem = next(name for prefix, name in _LIBRARY_BY_PREFIX if symbol.startswith(prefix))
        if symbol not in inside and library_stem in by_stem:
            wanted[by_stem[library_stem]][symbol] = version
    for symbol in _asked_by_name(torch_dir):
        wanted["libnvidia-ml.so.1" if symbol.startswith("nvml") else "libcuda.so.1"].setdefault(symbol, None)
    return wanted


def defined(built: Path) -> set[str]:
    """The functions that an object file or a library of ours defines."""
    return {line.split()[-1] for line in _run("nm", "--defined-only", built) if " T " in line}


def defined_dynamic(library: Path) -> list[str]:
    """The symbols that a shared library offers."""
    return _names(library, "--defined-only")


def _asked_by_name(torch_dir: Path) -> list[str]:
    """PyTorch looks these up when it runs and stops where one is missing."""
    header = torch_dir / "include" / "c10" / "cuda" / "driver_api.h"
    return re.findall(r"_\((cu\w+|nvml\w+)", header.read_text()) if header.exists() else []


def _names(library: Path, which: str) -> list[str]:
    return [line.split()[-1] for line in _run("nm", "-D", which, library) if line.split()]


def _run(*command: str | Path) -> list[str]:
    return subprocess.run(list(map(str, command)), check=True, text=True, capture_output=True).stdout.splitlines()
