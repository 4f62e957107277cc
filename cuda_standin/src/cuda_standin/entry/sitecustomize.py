"""Enters every Python process that has this folder on ``PYTHONPATH``, before its script: the stand-in comes with torch.

Nothing of an environment is changed that way. The package is loaded from where this file lies, not through
``sys.path``: beside it may be a whole environment, with another torch.
"""

import importlib.util
import os
import site
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _enter() -> None:
    if "cuda_standin" not in sys.modules:
        package = _HERE.parent
        spec = importlib.util.spec_from_file_location(
            "cuda_standin", package / "__init__.py", submodule_search_locations=[str(package)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["cuda_standin"] = module
        spec.loader.exec_module(module)
    import cuda_standin.autoload  # noqa: F401

    for folder in filter(None, os.environ.get("STANDIN_PACKAGES", "").split(os.pathsep)):
        site.addsitedir(folder)  # after the environment's own: what both have is the environment's


def _run_what_this_file_hides() -> None:
    """The ``sitecustomize`` that the environment has of its own."""
    for folder in sys.path:
        file = Path(folder or ".") / "sitecustomize.py"
        if file.is_file() and file.resolve().parent != _HERE:
            spec = importlib.util.spec_from_file_location("sitecustomize", file)
            assert spec is not None and spec.loader is not None
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
            return


_enter()
_run_what_this_file_hides()
