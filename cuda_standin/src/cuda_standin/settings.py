"""The environment variables of the stand-in, read and checked in one place.

| variable | meaning |
| --- | --- |
| ``STANDIN_GPU`` | which GPU the devices say they are (h100); ``gpu_names()`` lists them |
| ``STANDIN_MEMORY`` | MiB of each device (the GPU's own); an allocation beyond fails as a GPU's does |
| ``STANDIN_CONTEXT`` | MiB of it that the driver's context has taken before the first tensor (0) |
| ``STANDIN_DEVICES`` | how many devices (1); 0: a CUDA build of PyTorch on a machine without a GPU |
| ``STANDIN_VALUES`` | 0: no values at all; memory keeps what was there (1) |
| ``STANDIN_SKIP_BYTES`` | operators and copies on more bytes get no values: steps of any size run in seconds |
| ``STANDIN_RULES`` | what skipped operators leave, a sum of 1, 2, 4, 8 (15); see ``csrc/values/skipped.cpp`` |
| ``STANDIN_ROUTING`` | worst: tokens whose experts are tied all go to the same ones (balanced: they go round) |
| ``STANDIN_STRICT`` | 0: an operator without values is told in ``report()`` and goes on (1: it raises) |
| ``STANDIN_LATE`` | what runs as late as events allow: ``copies`` on side streams, ``side``, ``default``, ``all`` |
| ``STANDIN_CUDNN`` | 1: cuDNN's convolutions, without workspaces (0: PyTorch's own CUDA kernels) |
| ``STANDIN_LOG`` | a file that gets a line for each kernel, copy and allocation |
| ``STANDIN_TRACE`` | 1: names on stderr what was called and is not there |
| ``STANDIN_HEADERS`` | a folder with CUDA's headers of the version that PyTorch was built with |
| ``STANDIN_SCRIPT`` | a JSON file: the processes of a script are watched (``script/``) |
| ``STANDIN_PACKAGES`` | folders of packages that are visible beside the environment's own (``entry/``) |
| ``STANDIN_ALSO`` | other people's libraries that ask for CUDA's, separated by ``:`` |
| ``STANDIN_CACHE`` | where built libraries are kept (``~/.cache/cuda-standin``) |
| ``STANDIN_CUDA`` | 0: the stand-in is off; 1: it is loaded even where a real GPU is |
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

NUMBERS = ("STANDIN_MEMORY", "STANDIN_CONTEXT", "STANDIN_DEVICES", "STANDIN_SKIP_BYTES", "STANDIN_RULES")
FLAGS = ("STANDIN_VALUES", "STANDIN_STRICT", "STANDIN_CUDNN", "STANDIN_TRACE", "STANDIN_CUDA")
OTHERS = (
    "STANDIN_GPU",
    "STANDIN_LATE",
    "STANDIN_ROUTING",
    "STANDIN_SCRIPT",
    "STANDIN_PACKAGES",
    "STANDIN_LOG",
    "STANDIN_HEADERS",
    "STANDIN_ALSO",
    "STANDIN_CACHE",
)
# as in csrc/runtime/state.h
LATE = {"": 0, "copies": 1, "side": 2, "default": 4, "all": 6}


class StandinError(ImportError):
    """The stand-in cannot be what it was asked to be; the message says why and what to do."""


def gpu_names() -> tuple[str, ...]:
    """The values of ``STANDIN_GPU``, aliases included."""
    text = Path(__file__).with_name("csrc").joinpath("runtime", "gpus.h").read_text()
    names = re.findall(r'^\s*\{"([\w-]+)", "[^"]+", \d', text, re.MULTILINE)
    return tuple(names + re.findall(r'\{"([\w-]+)", "[\w-]+"\}', text))


def check(environment: Mapping[str, str] = os.environ) -> None:
    """Raises StandinError with one sentence for the first variable that has no meaning."""
    known = {*NUMBERS, *FLAGS, *OTHERS}
    for name in sorted(environment):
        value = environment[name]
        if not name.startswith("STANDIN_"):
            continue
        if name not in known:
            raise StandinError(f"{name}: the stand-in has no such variable; it has {', '.join(sorted(known))}.")
        if name in NUMBERS and not value.isdecimal():
            raise StandinError(f"{name}={value!r}: give a whole number.")
        if name in FLAGS and value not in ("0", "1"):
            raise StandinError(f"{name}={value!r}: give 0 or 1.")
    gpu = environment.get("STANDIN_GPU", "h100")
    if gpu not in gpu_names():
        raise StandinError(f"STANDIN_GPU={gpu!r}: no such GPU; there are {', '.join(gpu_names())}.")
    late = environment.get("STANDIN_LATE", "")
    if late not in LATE:
        raise StandinError(f"STANDIN_LATE={late!r}: give copies, side, default or all.")


def is_off(environment: Mapping[str, str] = os.environ) -> bool:
    return environment.get("STANDIN_CUDA") == "0"
