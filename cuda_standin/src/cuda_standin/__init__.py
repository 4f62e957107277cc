"""A CUDA runtime without a GPU: PyTorch's CUDA build runs, its own allocator counts, kernels are not run.

See README.md. ``python -m cuda_standin enable`` makes an environment load it with PyTorch.
"""

from cuda_standin.control import (
    counters,
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
    "StandinError", "counters", "gpu_names", "is_loaded", "log_operators", "report", "run_late", "set_capacity",
    "unsupported_calls",
]  # fmt: skip
