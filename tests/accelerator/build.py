"""Builds the accelerator's library with g++, once for each state of sources, torch and compiler."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

_SOURCES = Path(__file__).with_name("csrc")
_FLAGS = ("-O1", "-g0", "-std=c++20", "-shared", "-fPIC")


class NoCompilerError(Exception):
    """There is no C++ compiler to build the tests' accelerator with."""


def library() -> Path:
    """The built library; building it takes half a minute.

    Raises:
        NoCompilerError: no ``g++`` (nor what ``CXX`` names) is on the path.
        RuntimeError: the compiler failed; the message is its own.
    """
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise NoCompilerError(f"no C++ compiler ({name}) to build the tests' accelerator with")
    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    built = directory / f"standin-{_fingerprint(compiler)}.so"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(compiler, built)
    return built


def cache_directory() -> Path:
    base = os.environ.get("LOWTIDE_TEST_CACHE_DIR") or Path.home() / ".cache" / "lowtide-tests"
    return Path(base)


def _fingerprint(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout
    parts = [version, torch.__version__.encode(), torch.__file__.encode(), repr(_FLAGS).encode()]
    parts += [source.read_bytes() for source in sorted(_SOURCES.iterdir())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _build(compiler: str, built: Path) -> None:
    root = Path(torch.__file__).parent
    unfinished = built.with_suffix(f".{os.getpid()}")
    command = [
        compiler, *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        "-isystem", root / "include", "-isystem", root / "include/torch/csrc/api/include",
        _SOURCES / "standin.cpp", "-o", unfinished,
        f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{root / 'lib'}",
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        unfinished.unlink(missing_ok=True)
        raise RuntimeError(f"the tests' accelerator does not build:\n{done.stderr[:4000]}")
    unfinished.rename(built)
