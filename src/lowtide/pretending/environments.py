"""The Python that runs the script: one whose PyTorch is a CUDA build.

The environment that lowtide runs in, where its PyTorch is one. Else an environment of its own for each version of
PyTorch, made once by ``prepare`` (1.1 to 1.4 GB from the package index, no nvidia library) in lowtide's cache folder.
It holds PyTorch and what PyTorch needs; the packages of the environment that lowtide runs in come after its own, and
nothing of that environment is changed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lowtide.cache_files import cache_dir
from lowtide.errors import LowtideError
from lowtide.pretending.settings import PretendError, check_torch
from lowtide.pretending.standin_package import standin_folder

_READY = "ready"
# What PyTorch imports, where the user's environment may have none of it or one that is too new.
_NEEDED = (
    "filelock",
    "typing_extensions",
    "sympy",
    "networkx",
    "jinja2",
    "fsspec",
    "setuptools",
    "mpmath",
    "markupsafe",
)


class EnvironmentMissingError(LowtideError, ImportError):
    """No CUDA build of that PyTorch is here; the message has the command that brings one."""


@dataclass(frozen=True)
class ScriptEnvironment:
    """Attributes:
    python: Runs the script.
    torch: Version of its PyTorch.
    packages: Folders of packages that are visible after its own.
    """

    python: Path
    torch: str
    packages: tuple[Path, ...] = ()

    @property
    def bin(self) -> Path:
        return self.python.parent


def find(torch: str | None = None) -> ScriptEnvironment:
    """The environment for PyTorch ``torch``; None: the version that is installed here.

    Raises:
        EnvironmentMissingError: It has to be made first.
    """
    version, cuda = own_torch()
    wanted = torch or version
    if cuda and version == wanted:
        return ScriptEnvironment(Path(sys.executable), version)
    folder = folder_for(wanted)
    if (folder / _READY).exists():
        return ScriptEnvironment(folder / "bin" / "python", wanted, own_packages())
    here = (
        f"PyTorch {version} is here as a build without CUDA" if version == wanted else f"PyTorch {wanted} is not here"
    )
    option = "" if version == wanted and torch is None else f" --torch {wanted}"
    raise EnvironmentMissingError(
        f"{here}, and scripts run on a CUDA build. Make an environment for it, once (1.4 GB, beside yours, which stays "
        f"as it is): lowtide pretend --prepare{option}"
    )


def own_torch() -> tuple[str, str | None]:
    """Version and CUDA version of the PyTorch that is installed here, read and not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise PretendError("this environment has no PyTorch. Say which version the script is to run on: --torch 2.14.1")
    return _versions(Path(spec.origin).with_name("version.py"))


def _versions(file: Path) -> tuple[str, str | None]:
    text = file.read_text(encoding="utf-8")
    version = re.search(r"^__version__\s*=\s*'([^'+]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\s*(?::[^=]*)?=\s*'([\d.]+)'", text, re.MULTILINE)
    if version is None:
        raise PretendError(f"{file} names no version of PyTorch; is it whole?")
    return version[1], cuda[1] if cuda else None


def own_packages() -> tuple[Path, ...]:
    found = dict.fromkeys(Path(sysconfig.get_paths()[kind]) for kind in ("purelib", "platlib"))
    source = Path(__file__).parents[2]  # a checkout that is not installed
    return (*found, *([source] if source not in found and not source.name.endswith("-packages") else []))


def folder_for(torch: str) -> Path:
    return cache_dir() / "environments" / f"torch-{torch}-python-{sys.version_info.major}.{sys.version_info.minor}"


def prepare(torch: str | None = None, report: Callable[[str], object] = print) -> ScriptEnvironment:
    """Makes the environment for PyTorch ``torch``, and builds the stand-in for it. Some minutes, once.

    Raises:
        PretendError: The package index has no CUDA build of it, or something does not install or build.
    """
    if torch is not None:
        check_torch(torch)
    version, cuda = own_torch() if torch is None else (torch, None)
    if cuda:
        return ScriptEnvironment(Path(sys.executable), version)
    folder = folder_for(version)
    if (folder / _READY).exists():
        return ScriptEnvironment(folder / "bin" / "python", version, own_packages())
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    report(f"Making an environment for PyTorch {version} in {folder}.")
    _run(sys.executable, "-m", "venv", folder)
    made = ScriptEnvironment(folder / "bin" / "python", version, own_packages())
    report(f"Installing the CUDA build of PyTorch {version} without its nvidia packages.")
    # === takes the version as written: "2.13.0" and not "2.13.0+cpu", which some indexes offer as well.
    _install(made, f"torch==={version}")
    library = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages" / "torch"
    _, cuda = _versions(library / "version.py")
    if cuda is None:
        raise PretendError(f"the package index offers PyTorch {version} for this machine without CUDA only.")
    numpy = "numpy<2" if tuple(map(int, version.split(".")[:2])) < (2, 4) else "numpy"
    _install(made, *_triton(library), *_headers(cuda), *_NEEDED, numpy)
    report("Building the stand-in for it; half a minute.")
    for verb in ("slim", "build"):
        _run(made.python, "-m", "cuda_standin", verb, env=entering(dict(os.environ), made))
    (folder / _READY).touch()
    return made


def entering(variables: dict[str, str], environment: ScriptEnvironment) -> dict[str, str]:
    """``variables``, with which each Python process has the stand-in and sees the packages of here."""
    path = [str(standin_folder() / "entry"), *filter(None, [variables.get("PYTHONPATH")])]
    return {
        **variables,
        "PYTHONPATH": os.pathsep.join(path),
        "PATH": os.pathsep.join([str(environment.bin), variables.get("PATH", os.defpath)]),
        "STANDIN_PACKAGES": os.pathsep.join(map(str, environment.packages)),
    }


def _triton(library: Path) -> list[str]:
    """The version of Triton that this PyTorch asks for."""
    for metadata in library.parent.glob("torch-*.dist-info/METADATA"):
        found = re.search(
            r"^Requires-Dist: (triton)\s*\(?==\s*([\d.]+)", metadata.read_text(encoding="utf-8"), re.MULTILINE
        )
        if found:
            return [f"triton=={found[2]}"]
    return []


def _headers(cuda: str) -> list[str]:
    """Packages with CUDA's headers."""
    major, minor = cuda.split(".")[:2]
    if major == "11":
        return ["nvidia-cuda-runtime-cu11==11.7.*", "nvidia-cuda-crt"]
    if major == "12":
        return [f"nvidia-cuda-runtime-cu12==12.{minor}.*", "nvidia-cuda-crt"]
    return ["nvidia-cuda-runtime", "nvidia-cuda-crt"]


def _install(environment: ScriptEnvironment, *packages: str) -> None:
    _run(environment.python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", *packages)


def _run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True)
    if done.returncode:
        words = " ".join(str(word) for word in command[1:])
        raise PretendError(f"{Path(command[0]).name} {words} failed:\n{(done.stderr or done.stdout)[-2000:].strip()}")
