"""Loads the stand-in when PyTorch is imported: CUDA's libraries before it, the value layer after it.

``python -m cuda_standin enable`` writes ``import cuda_standin.autoload`` into a ``.pth`` file of the environment, so
that every process of it has this hook. It costs nothing until ``torch`` is imported.
"""

import os
import sys
from importlib.machinery import ModuleSpec

from cuda_standin import imports


def _load(spec: ModuleSpec) -> None:
    from cuda_standin import loading, settings

    if settings.is_off():
        return
    loading.load_libraries(spec)
    imports.after_import("torch", loading.load_values)
    if os.environ.get("STANDIN_SCRIPT"):
        from cuda_standin import script

        imports.after_import("torch", script.start)


if "torch" not in sys.modules and "torch" not in imports._before:
    imports.before_import("torch", _load)
