"""What PyTorch's libraries ask of CUDA's: read from their dynamic sections with readelf and nm.

Nothing is listed by hand, so a PyTorch of another version needs no change: libraries, their numbers and their symbols
are those that this PyTorch names.
"""

import re
import string
import subprocess
from collections.abc import Iterable
from pathlib import Path

from cuda_standin.settings import StandinError

# By the beginning of a symbol that has no version, the library it belongs to; the longer beginning comes first.
_LIBRARY_BY_PREFIX = (
    ("cusparseLt", "libcusparseLt"), ("nccl", "libnccl"), ("cuFile", "libcufile"), ("cupti", "libcupti"),
    ("nvshmem", "libnvshmem_host"), ("cublasLt", "libcublasLt"), ("nvtx", "libnvToolsExt"), ("cudnn", "libcudnn"),
    ("cublas", "libcublas"), ("cusparse", "libcusparse"), ("cusolver", "libcusolver"), ("cufft", "libcufft"),
    ("curand", "libcurand"), ("nvrtc", "libnvrtc"), ("__cuda", "libcudart"), ("cuda", "libcudart"),
    *((f"cu{letter}", "libcuda") for letter in string.ascii_uppercase),
)  # fmt: skip
_OF_CUDA = re.compile(r"__cuda|cu|nv|nccl")
_LIBRARY_OF_CUDA = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvToolsExt|nvJitLink)")
_NVML = (
    "nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetComputeRunningProcesses",
    "nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetGpuFabricInfoV",
)  # fmt: skip


def stem(soname: str) -> str:
    """``libcudart`` of ``libcudart.so.13``."""
    return soname.split(".so")[0]


def library_of(symbol: str) -> str | None:
    """``libcusolver`` of ``cusolverDnCreate``; None: it is none of CUDA's."""
    return next((name for prefix, name in _LIBRARY_BY_PREFIX if symbol.startswith(prefix)), None)


def needed(torch_dir: Path, others: Iterable[Path] = ()) -> dict[str, dict[str, str | None]]:
    """By library (``libcudart.so.13``), the symbols that PyTorch and ``others`` leave undefined, and their versions.

    Raises:
        StandinError: PyTorch asks for a symbol of CUDA's that belongs to no library that it names.
    """
    folder = torch_dir / "lib"
    libraries = sorted(folder.glob("lib*.so*"))
    wanted: dict[str, dict[str, str | None]] = {"libcuda.so.1": {}, "libnvidia-ml.so.1": dict.fromkeys(_NVML)}
    loose: dict[str, tuple[str | None, Path]] = {}  # symbols without a library: their version, and who asks
    weak: set[str] = set()  # these may stay undefined
    inside: set[str] = set()  # PyTorch 2.2 to 2.5 bring cusparseLt with them
    for library in [*libraries, *others]:
        for line in _run("readelf", "-d", library):
            match = re.search(r"NEEDED.*\[(.*)\]", line)
            if match and _LIBRARY_OF_CUDA.match(match[1]) and not (folder / match[1]).exists():
                wanted.setdefault(match[1], {})
        weak |= {name.partition("@")[0] for name in _names(library, "--undefined-only", kinds="vw")}
        for name in _names(library, "--undefined-only"):
            symbol, _, named = name.partition("@")
            version = named.lstrip("@")
            if not _OF_CUDA.match(symbol):
                continue
            if ".so" in version:
                wanted.setdefault(version, {})[symbol] = version
            else:
                loose[symbol] = (version or None, library)
        inside |= {name.partition("@")[0] for name in defined_dynamic(library)}
    by_stem = {stem(soname): soname for soname in wanted}
    homeless = []
    for symbol, (of_version, asker) in loose.items():
        if symbol in inside:
            continue
        library_stem = library_of(symbol)
        if library_stem in by_stem:
            wanted[by_stem[library_stem]][symbol] = of_version
        elif symbol not in weak and asker.parent == folder:  # others may have libraries of their own
            homeless.append(f"{symbol} ({asker.name} asks for it)")
    if homeless:
        raise StandinError(
            f"cuda_standin: the stand-in has no library for {', '.join(homeless)}. "
            "Add the beginning of the name, and a library that this PyTorch links to, to symbols.py."
        )
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


def _names(library: Path, which: str, kinds: str = "") -> list[str]:
    fields = [line.split() for line in _run("nm", "-D", which, library)]
    return [line[-1] for line in fields if line and (not kinds or line[-2] in kinds)]


def _run(*command: str | Path) -> list[str]:
    return subprocess.run(list(map(str, command)), check=True, text=True, capture_output=True).stdout.splitlines()
