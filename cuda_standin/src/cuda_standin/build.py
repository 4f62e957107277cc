"""Builds the stand-in libraries for one PyTorch, once, and keeps them.

The libraries in ``OURS`` have sources here. Of every other library that PyTorch links against, and of every symbol that
ours do not have, a stub is generated that answers "not supported". So no ``nvidia-*`` package is needed, and a symbol
that a new PyTorch asks for is there.
"""

import fcntl
import hashlib
import mmap
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from cuda_standin import headers, symbols
from cuda_standin.settings import StandinError
from cuda_standin.symbols import stem

SOURCES = Path(__file__).with_name("csrc")
# The sources of the libraries that are ours; the number behind .so is the one that PyTorch asks for.
OURS = {
    "libcudart": ("runtime/state.cpp", "runtime/memory.cpp", "runtime/streams.cpp", "runtime/kernels.cpp",
                  "runtime/devices.cpp", "runtime/step_record.cpp"),
    "libcuda": ("driver.cpp",),
    "libcublas": ("cublas.cpp",),
    "libcublasLt": ("cublaslt.cpp",),
    "libnvrtc": ("nvrtc.cpp",),
    "libnvidia-ml": ("nvml.cpp",),
    "libnccl": ("nccl.cpp",),
}  # fmt: skip
# One translation unit; the first comes first because it opens a private part of the dispatcher for old versions.
VALUES = ("values/values.cpp", "values/attention.cpp", "values/by_hand.cpp", "values/skipped.cpp", "values/host.cpp",
          "values/operator_log.cpp", "values/sparse.cpp")  # fmt: skip
# "Not supported" in the words of each library; 0 where success is the more useful answer.
_NOT_SUPPORTED = {
    "libcudart": 801, "libcuda": 801, "libcublas": 0, "libcublasLt": 0, "libcudnn": 3000, "libcusparse": 10,
    "libcusolver": 9, "libcufft": 16, "libcurand": 0, "libnccl": 5, "libnvrtc": 5, "libcupti": 15, "libcufile": 5001,
    "libcusparseLt": 10, "libnvshmem_host": 1, "libnvidia-ml": 3, "libnvToolsExt": 0, "libnvJitLink": 1,
}  # fmt: skip
_FINISHED = "finished"


def libraries(torch_dir: Path) -> Path:
    """The folder with the libraries for the PyTorch in ``torch_dir``; building them takes half a minute.

    ``order.txt`` in it has their names in the order in which they are loaded; ``libvalues.so`` comes after PyTorch.

    Raises:
        StandinError: this PyTorch has no CUDA, there is no compiler, or CUDA's headers are not there.
    """
    version = (torch_dir / "version.py").read_text()
    cuda = re.search(r"^cuda\s*(?::[^=]*)?=\s*'([\d.]+)'", version, re.MULTILINE)
    if cuda is None:
        raise StandinError(
            f"cuda_standin: the PyTorch in {torch_dir} is built without CUDA. Install a CUDA build, which needs no "
            "nvidia package here: pip install --no-deps torch==2.14.1, or turn the stand-in off with STANDIN_CUDA=0."
        )
    folder = _cache() / _fingerprint(torch_dir, version)
    if (folder / _FINISHED).exists():
        return folder
    for tool in (_compiler(), "nm", "readelf"):
        if shutil.which(tool) is None:
            raise StandinError(
                f"cuda_standin needs {tool} to build, and it is not on the path (Debian: apt install g++)."
            )
    includes = headers.folders(cuda[1])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / _FINISHED).exists():
            _build(folder, torch_dir, includes)
            (folder / _FINISHED).touch()
    return folder


def _cache() -> Path:
    return Path(os.environ.get("STANDIN_CACHE") or Path.home() / ".cache" / "cuda-standin")


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _fingerprint(torch_dir: Path, version: str) -> str:
    parts = [version, str(torch_dir), os.environ.get("STANDIN_HEADERS", ""), _compiler()]
    parts += [f"{path} {path.stat().st_size}" for path in _other_libraries()]
    own = [path for path in sorted(SOURCES.rglob("*")) if path.is_file()] + [Path(__file__)]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in own:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _other_libraries() -> list[Path]:
    """Other people's libraries that ask for CUDA's: bitsandbytes and what STANDIN_ALSO names."""
    named = [Path(path) for path in os.environ.get("STANDIN_ALSO", "").split(os.pathsep) if path]
    # As import would find it: a folder on PYTHONPATH may hold another version than the environment.
    folders = (Path(place) / "bitsandbytes" for place in (*sys.path, sysconfig.get_paths()["purelib"]))
    first = next((folder for folder in folders if folder.is_dir()), Path("bitsandbytes"))
    return sorted(first.glob("lib*cuda*.so")) + named


def _build(folder: Path, torch_dir: Path, includes: list[Path]) -> None:
    wanted = symbols.needed(torch_dir, _other_libraries())
    runtime = next((soname for soname in wanted if stem(soname) == "libcudart"), None)
    if runtime is None:
        raise StandinError(
            f"cuda_standin: no library in {torch_dir / 'lib'} asks for libcudart; is this PyTorch whole?"
        )
    flags = [
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-w",
        f"-DSTANDIN_ARCHS={_architectures(torch_dir)}",
        f"-I{includes[0]}",
        *(f"-idirafter{i}" for i in includes[1:]),
    ]
    objects = {
        soname: [_compile(folder, source, flags) for source in OURS[stem(soname)]]
        for soname in wanted if stem(soname) in OURS
    }  # fmt: skip
    ours = {name for files in objects.values() for file in files for name in symbols.defined(file)}
    order = [runtime, *sorted(soname for soname in wanted if soname != runtime)]
    for soname in order:
        _link(folder, soname, objects.get(soname, []), wanted[soname], ours, runtime)
    (folder / "libcuda.so").unlink(missing_ok=True)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # Triton before 3.4 links with -lcuda
    (folder / "order.txt").write_text("\n".join(order) + "\n")
    _build_values(folder, torch_dir, includes, runtime)


def _architectures(torch_dir: Path) -> str:
    """The GPU code that this PyTorch has, as ``torch.cuda.get_arch_list()`` says it: ``75,80,86,90``."""
    for name in ("libtorch_python.so", "libtorch_cuda.so"):
        with (
            (torch_dir / "lib" / name).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            found = re.search(rb"sm_\d{2,3}a?(?: (?:sm|compute)_\d{2,3}a?)+", text)
            if found:
                return ",".join(re.findall(r"sm_(\d+)", bytes(text[found.start() : found.end()]).decode()))
    return "0"


def _compile(folder: Path, source: str, flags: list[str]) -> Path:
    made = folder / (source.replace("/", "-") + ".o")
    _run(_compiler(), *flags, "-c", SOURCES / source, "-o", made)
    return made


def _link(
    folder: Path, soname: str, objects: list[Path], wanted: dict[str, str | None], ours: set[str], runtime: str
) -> None:
    """One library: our objects, and stubs for what they lack, each symbol under the version that is asked for."""
    stub = folder / f"{soname}.c"
    stub.write_text(_stubs(soname, sorted(set(wanted) - ours)))
    made = folder / f"{soname}.o"
    _run(_compiler(), "-x", "c", "-w", "-fPIC", "-O1", "-c", stub, "-o", made)
    command: list[str | Path] = [
        _compiler(), "-shared", "-o", folder / soname, f"-Wl,-soname,{soname}", *objects, made,
    ]  # fmt: skip
    by_version: dict[str, list[str]] = {}
    for symbol, version in sorted(wanted.items()):
        if version:
            by_version.setdefault(version, []).append(symbol)
    if by_version:
        script = folder / f"{soname}.map"
        script.write_text(
            "".join(f"{v} {{ global: {' '.join(s + ';' for s in n)} }};\n" for v, n in by_version.items())
        )
        command.append(f"-Wl,--version-script={script}")
    if soname != runtime:
        command += ["-Wl,--no-as-needed", folder / runtime]
    _run(*command, "-Wl,-rpath,$ORIGIN", "-ldl")


def _stubs(soname: str, names: list[str]) -> str:
    code = _NOT_SUPPORTED.get(re.sub(r"^libcudnn_.*", "libcudnn", stem(soname)), 801)
    lines = ["int standin_unsupported(const char*, int);"]
    for name in names:
        if name.startswith(("nvshmemid_", "nvshmemi_device")):
            lines.append(f"char {name}[4096];")  # data, not a function
        elif name.startswith(("cublas", "nvml")):
            lines.append(f"int {name}() {{ return 0; }}")
        else:
            lines.append(f'int {name}() {{ return standin_unsupported("{name}", {code}); }}')
    return "\n".join(lines) + "\n"


def _build_values(folder: Path, torch_dir: Path, includes: list[Path], runtime: str) -> None:
    lib, include = torch_dir / "lib", torch_dir / "include"
    # up to 2.5 PyTorch was built with the old strings of libstdc++
    abi = int("torchCheckFailEPKcS2_jRKSs" not in "".join(symbols.defined_dynamic(lib / "libc10.so")))
    flags = [
        "-std=c++20", "-O1", "-fPIC", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *_version_flags(include),
        f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", f"-I{includes[0]}",
        *(f"-idirafter{i}" for i in includes[1:]),
    ]  # fmt: skip
    together = folder / "values.cpp"  # PyTorch's headers take longer than all of these files
    together.write_text("".join(f'#include "{SOURCES / source}"\n' for source in VALUES))
    _run(
        _compiler(), *flags, "-shared", together, "-o", folder / "libvalues.so", f"-L{lib}", "-lc10", "-ltorch_cpu",
        "-lc10_cuda", "-ltorch_cuda", folder / runtime, f"-Wl,-rpath,{lib}:$ORIGIN", "-Wl,--no-as-needed",
        "-Wl,--unresolved-symbols=ignore-in-shared-libs",
    )  # fmt: skip


def _version_flags(include: Path) -> list[str]:
    """What this PyTorch's headers have, read from them."""
    flags = []
    if "SafeKernelFunction" not in (include / "ATen/core/dispatch/OperatorEntry.h").read_text():
        flags.append("-DSTANDIN_OLD_DISPATCH")
    allocator = (include / "c10/cuda/CUDACachingAllocator.h").read_text()
    if "attachAllocatorTraceTracker" in allocator:
        own = "struct TraceEntry {" in allocator
        flags.append(
            "-DSTANDIN_TRACKER=" + ("c10::cuda::CUDACachingAllocator" if own else "c10::CachingDeviceAllocator")
        )
    return flags


def _run(*command: str | Path) -> None:
    done = subprocess.run(list(map(str, command)), text=True, capture_output=True)
    if done.returncode:
        raise StandinError(
            f"cuda_standin does not build; {' '.join(map(str, command[:1]))} says:\n{done.stderr[:4000]}"
        )
