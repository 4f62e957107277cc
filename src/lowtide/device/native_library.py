"""Some lines of C++ of ours, for this PyTorch: from lowtide's wheel if it has them built, else built once, beside the
training, and kept in lowtide's cache directory."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lowtide.cache_files import cache_dir, read_file, write_file

# What setup.py puts into a wheel, a folder for each library.
_SHIPPED = Path(__file__).with_name("built")
_FLAGS = ("-std=c++20", "-O1", "-g0", "-w", "-shared", "-fPIC")

HANDLE, INTEGER = ctypes.c_void_p, ctypes.c_int64

Functions = Mapping[str, tuple[Any, Sequence[Any]]]


class NativeLibrary:
    """One source file of ``csrc``, for this process; whoever uses it can do without.

    Args:
        name: Of the source file, and of the folder in the cache directory.
        what: What it is called in messages.
        variable: The environment variable that names another folder; 0: there is no such library.
        functions: Result and arguments of each, by name.
        on_load: Called once it is there, before anybody can see that.

    Attributes:
        loaded: The library; None as long as it is not there.
        why_missing: Why it is not; "" where it is, or may still come.
    """

    def __init__(
        self, name: str, what: str, variable: str, functions: Functions, on_load: Callable[[Any], None]
    ) -> None:
        self.source = Path(__file__).with_name("csrc") / f"{name}.cpp"
        self._name, self._what, self._variable = name, what, variable
        self._functions, self._on_load = functions, on_load
        self.lock = threading.RLock()
        self.loaded: Any = None
        self.why_missing = ""
        self._building: threading.Thread | None = None

    def prepare(self, *, waits: bool = False) -> None:
        """Load it; where nobody has built it yet, build it on a thread of its own. It is there a little later.

        Args:
            waits: Until it is there, or is known to be missing.
        """
        with self.lock:
            if self.loaded is None and not self.why_missing and self._building is None:
                try:
                    path = self.path()
                    if self._is_shipped(path.name):
                        pass
                    elif path.exists():
                        read_file(path)  # one that somebody else could have written is not believed
                        self._load(path)
                    else:
                        self._building = threading.Thread(target=self._build, name=f"lowtide-{self._name}", daemon=True)
                        self._building.start()
                except Exception as error:  # nothing of this may end a training
                    self.why_missing = _in_a_line(error)
            building = self._building
        if waits and building is not None:
            building.join()

    def path(self) -> Path:
        """Where it is kept, for this PyTorch. Raises: OSError: there is to be none."""
        facts = [torch.__version__, str(torch.version.git_version), str(torch.compiled_with_cxx11_abi())]
        facts += [platform.system(), platform.machine(), *_FLAGS]
        digest = hashlib.sha256("\0".join(facts).encode() + self.source.read_bytes())
        place = os.environ.get(self._variable, "")
        if place == "0":
            raise OSError(f"{self._variable}=0")
        name = f"torch-{torch.__version__}-{digest.hexdigest()[:16]}.so"
        return (Path(place) if place else cache_dir() / self._name) / name

    def build(self, into: Path | None = None) -> Path:
        """Build it for this PyTorch. Raises: OSError: no compiler, or no place to keep it.

        Args:
            into: The folder of all shipped libraries, instead of where it is kept.
        """
        name = os.environ.get("CXX", "c++")
        compiler = shutil.which(name) or shutil.which("g++")
        if compiler is None:
            raise OSError(f"there is no C++ compiler ({name}) to build {self._what} with{self._shipped_for_others()}")
        root, path = Path(torch.__file__).parent, self.path()
        if into is not None:
            path = into / self._name / path.name
        with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
            made = Path(folder) / path.name
            command = [
                compiler, *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                "-isystem", root / "include", self.source, "-o", made, f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu",
            ]  # fmt: skip
            nicely = [nice, "-n", "10"] if (nice := shutil.which("nice")) else []  # training has the cores
            done = subprocess.run([*nicely, *map(str, command)], capture_output=True, text=True)
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if "error" in line]
                said = errors[0] if errors else f"exit code {done.returncode}"
                raise OSError(f"{Path(compiler).name} cannot build {self._what}: {said.strip()[:200]}")
            write_file(path, made.read_bytes())
        return path

    def _is_shipped(self, file_name: str) -> bool:
        """Load the one of the wheel. False: it has none for this PyTorch, or one for a newer system than this."""
        path = _SHIPPED / self._name / file_name
        try:
            if path.exists():
                self._load(path)
        except OSError:
            return False
        return self.loaded is not None

    def _shipped_for_others(self) -> str:
        others = sorted({path.stem.split("-")[1] for path in (_SHIPPED / self._name).glob("torch-*.so")})
        return f" (this wheel has it built for PyTorch {', '.join(others)}; this is {torch.__version__})" * bool(others)

    def _build(self) -> None:
        try:
            path = self.build()
            with self.lock:
                self._load(path)
        except Exception as error:
            self.why_missing = _in_a_line(error)
        self._building = None

    def _load(self, path: Path) -> None:
        """Called with the lock held."""
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in self._functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._on_load(library)
        self.loaded = library


def _in_a_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0]
