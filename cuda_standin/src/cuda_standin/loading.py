"""Puts the stand-in's libraries where PyTorch finds CUDA's, and the value layer behind its operators."""

import atexit
import ctypes
import os
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from cuda_standin import build, settings
from cuda_standin.settings import StandinError

_LETS_GO_S = 0.05
_REAL_DRIVER = Path("/dev/nvidiactl")
folder: Path | None = None  # of the libraries that this process has loaded


def load_libraries(torch_spec: ModuleSpec) -> None:
    """Loads CUDA's libraries as the stand-in has them, before PyTorch asks for them.

    A library that is loaded under its SONAME is what the loader finds when somebody needs that name.

    Raises:
        StandinError: a variable has no meaning, a real GPU or another CUDA runtime is there, or nothing can be built.
    """
    global folder
    settings.check()
    assert torch_spec.origin is not None
    _refuse_what_is_there()
    folder = build.libraries(Path(torch_spec.origin).parent)
    for name in (folder / "order.txt").read_text().split():
        # global: libcudart defines what the others may ask the driver for
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    runtime().standin_set_late(settings.LATE[os.environ.get("STANDIN_LATE", "")])
    os.environ.setdefault("TRITON_LIBCUDA_PATH", str(folder))  # Triton links its launcher with the stand-in driver
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # workers would load another stand-in each


def load_values(torch: ModuleType) -> None:
    """Replaces the kernels of the CUDA key, which do nothing, by those with values (``STANDIN_VALUES=1``)."""
    if os.environ.get("STANDIN_DEVICES") == "0":
        return
    torch.backends.cudnn.enabled = os.environ.get("STANDIN_CUDNN", "0") == "1"
    if os.environ.get("STANDIN_VALUES", "1") == "1":
        values()
        # TorchScript's fuser compiles kernels of its own at run time, which would leave what was there before.
        torch._C._jit_override_can_fuse_on_gpu(False)
    atexit.register(_let_backward_end, torch)


def _let_backward_end(torch: ModuleType) -> None:
    """Autograd's thread lets go of Python objects after ``backward()``; once the interpreter is gone, it aborts."""
    if torch.cuda.is_initialized():
        time.sleep(_LETS_GO_S)


def runtime() -> ctypes.CDLL:
    return ctypes.CDLL(str(_loaded() / (_loaded() / "order.txt").read_text().split()[0]))


def values() -> ctypes.CDLL:
    return ctypes.CDLL(str(_loaded() / "libvalues.so"), mode=ctypes.RTLD_GLOBAL)


def _loaded() -> Path:
    if folder is None:
        raise StandinError(
            "the CUDA stand-in is not loaded in this process: import torch in an environment where it is enabled "
            "(python -m cuda_standin enable), without STANDIN_CUDA=0."
        )
    return folder


def _refuse_what_is_there() -> None:
    for path in _loaded_runtimes():
        raise StandinError(
            f"cuda_standin: {path} is loaded in this process already, and two CUDA runtimes do not go together. "
            "Import torch before what loads it, or turn the stand-in off with STANDIN_CUDA=0."
        )
    if _REAL_DRIVER.exists() and os.environ.get("STANDIN_CUDA") != "1":
        raise StandinError(
            f"cuda_standin: this machine has a real NVIDIA GPU ({_REAL_DRIVER}), which the stand-in would hide. "
            "Ask for the stand-in with STANDIN_CUDA=1, or for the GPU with STANDIN_CUDA=0."
        )


def _loaded_runtimes() -> list[str]:
    mapped = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    files = {fields[5] for fields in mapped if len(fields) == 6}
    return sorted(path for path in files if Path(path).name.startswith(("libcudart.so", "libcuda.so")))
