"""A CUDA runtime without a GPU: PyTorch's CUDA build runs, its own allocator counts, kernels are not run.

See README.md. ``python -m cuda_standin enable`` makes an environment load it with PyTorch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cuda_standin.control import (
        Counters,
        Report,
        counters,
        foreign_libraries,
        is_loaded,
        log_operators,
        report,
        run_late,
        set_capacity,
        unsupported_calls,
    )
    from cuda_standin.settings import StandinError, gpu_names

__version__ = "0.1.0"
__all__ = [
    "Counters", "Report", "StandinError", "counters", "foreign_libraries", "gpu_names", "is_loaded", "log_operators",
    "report", "run_late", "set_capacity", "unsupported_calls",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Imported when asked for: every process of an enabled environment imports this file when it starts."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cuda_standin import control, settings

    return getattr(settings if hasattr(settings, name) else control, name)
