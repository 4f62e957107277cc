"""lowtide: the fastest PyTorch training step that fits the memory it has.

``__init__.pyi`` lists the public names once, for type checkers and for this file, as SPEC 1 of Scientific Python does
(https://scientific-python.org/specs/spec-0001/). A name is imported on first use: plain data needs no torch.
"""

import ast
import importlib
import random
from pathlib import Path
from typing import Any

__version__ = "0.3.0"

_HOME = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    state = random.getstate()  # importing rich draws from it; a fit must leave every generator as it was
    try:
        found = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
        return found
    except (ImportError, AttributeError) as error:
        lacking = error.name if isinstance(error, ImportError) else getattr(error.obj, "__name__", "")
        if (lacking or "").startswith("torch."):
            raise importlib.import_module("lowtide.pytorch_internals").explained(error) from error
        raise
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
