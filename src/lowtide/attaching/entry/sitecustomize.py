"""Enters every Python process that has this folder on ``PYTHONPATH``, before its script.

What it enters for is in the variables of the environment; see ``lowtide.attaching.entering``.
"""

import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _enter() -> None:
    if importlib.util.find_spec("lowtide") is None:  # another environment's Python: as the command has it
        sys.path.append(str(_HERE.parents[2]))
    import lowtide.attaching.entering

    lowtide.attaching.entering.enter()


def _run_what_this_file_hides() -> None:
    """The ``sitecustomize`` that the environment has of its own."""
    for folder in sys.path:
        file = Path(folder or ".") / "sitecustomize.py"
        if file.is_file() and file.resolve().parent != _HERE and "cuda_standin" not in file.parts:
            spec = importlib.util.spec_from_file_location("sitecustomize", file)
            assert spec is not None and spec.loader is not None
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
            return


_enter()
_run_what_this_file_hides()
