"""Where the CUDA stand-in's package lies, and what is read from it; it is never imported here.

It is loaded in the script's own process, with another PyTorch. In an installation it is a package beside lowtide, in a
checkout a folder beside ``src``.
"""

import importlib.util
import re
from functools import cache
from pathlib import Path

from lowtide.errors import LowtideError


class StandinMissingError(LowtideError, ImportError):
    """The package ``cuda_standin`` is not installed."""


@cache
def standin_folder() -> Path:
    """The folder of the package ``cuda_standin``. Raises: StandinMissingError."""
    spec = importlib.util.find_spec("cuda_standin")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    beside = Path(__file__).parents[3] / "cuda_standin" / "src" / "cuda_standin"
    if (beside / "__init__.py").is_file():
        return beside
    raise StandinMissingError(
        "the package cuda_standin is not installed, on which scripts run without a GPU. It is in lowtide's repository: "
        "pip install ./cuda_standin"
    )


@cache
def memory_of(device: str) -> int:
    """Bytes of the stand-in's ``device``, as a process sees them."""
    text = (standin_folder() / "csrc" / "runtime" / "gpus.h").read_text(encoding="utf-8")
    found = re.search(rf'\{{"{re.escape(device)}", "[^"]+", \d+, \d+, \d+, (\d+),', text)
    assert found is not None, device
    return int(found[1]) << 20


@cache
def standin_gpus() -> tuple[str, ...]:
    """The devices that it knows, by lowtide's names."""
    text = (standin_folder() / "csrc" / "runtime" / "gpus.h").read_text(encoding="utf-8")
    return tuple(re.findall(r'^\s*\{"([\w-]+)", "[^"]+", \d', text, re.MULTILINE))
