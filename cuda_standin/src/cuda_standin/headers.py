"""CUDA's headers for the version that PyTorch was built with: types, the sizes of structures, nothing that is linked.

They come with Triton's wheel (3.6 and newer, CUDA 13), with the wheels ``nvidia-cuda-runtime`` and ``nvidia-cuda-crt``
(CUDA 13), ``nvidia-cuda-runtime-cu12`` and ``-cu11`` (which lack ``crt/``), and with the toolkit.
"""

import os
import re
import sysconfig
from pathlib import Path

from cuda_standin.settings import StandinError


def folders(cuda_version: str) -> list[Path]:
    """The folder with the headers of ``cuda_version`` ("13.0"), then one that has ``crt/`` if the first lacks it.

    Structures are the same within a major version, so any 13.x serves 13.0; the nearest is taken.

    Raises:
        StandinError: there are none of that major version; the message says which package brings them.
    """
    major, minor = (int(part) for part in cuda_version.split("."))
    found = [(version, folder) for folder in _candidates() if (version := _version(folder))]
    same = [(abs(version % 1000 // 10 - minor), folder) for version, folder in found if version // 1000 == major]
    if not same:
        here = ", ".join(f"CUDA {v // 1000}.{v % 1000 // 10} in {folder}" for v, folder in found) or "none"
        wheel = "nvidia-cuda-runtime" if major >= 13 else f"nvidia-cuda-runtime-cu{major}"
        raise StandinError(
            f"cuda_standin needs CUDA {major}'s headers to build, and found {here}. "
            f"Bring them with: pip install --no-deps '{wheel}=={major}.*' nvidia-cuda-crt, "
            "or name a folder in STANDIN_HEADERS."
        )
    best = min(same, key=lambda pair: pair[0])[1]  # of equals the first: what the user named, then the environment's
    others = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/include"))  # nvidia-cuda-crt has nothing else
    crt = [folder for folder in [best, *(folder for _, folder in found), *others] if (folder / "crt").is_dir()]
    if not crt:
        raise StandinError(
            f"cuda_standin needs the headers crt/ of CUDA, which {best} lacks. "
            "Bring them with: pip install --no-deps nvidia-cuda-crt (any version serves)."
        )
    return list(dict.fromkeys([best, crt[0]]))


def _candidates() -> list[Path]:
    site = Path(sysconfig.get_paths()["purelib"])
    named = os.environ.get("STANDIN_HEADERS")
    if named and not (Path(named) / "cuda.h").is_file():
        raise StandinError(f"STANDIN_HEADERS={named!r}: there is no cuda.h in it.")
    places = [
        *([Path(named)] if named else []),
        *sorted(site.glob("nvidia/cu*/include")),
        site / "nvidia/cuda_runtime/include",
        site / "triton/backends/nvidia/include",
        *(Path(root) / "include" for root in [os.environ.get("CUDA_HOME"), "/usr/local/cuda"] if root),
    ]
    return [place for place in places if (place / "cuda.h").is_file() and (place / "driver_types.h").is_file()]


def _version(folder: Path) -> int | None:
    """``CUDA_VERSION`` as its header has it: 13010 for 13.1."""
    with open(folder / "cuda.h", errors="replace") as header:
        for line in header:
            if match := re.match(r"#define CUDA_VERSION (\d+)", line):
                return int(match[1])
    return None
