"""torch.compile where nothing takes time: candidates are not raced, and how long compiling takes is said apart."""

import functools
import time
from typing import Any

from cuda_standin import imports
from cuda_standin.script import record


def install() -> None:
    imports.after_import("torch._inductor.runtime.benchmarking", _one_millisecond)
    imports.after_import("torch._inductor.compile_fx", _timed)


def _one_millisecond(module: Any) -> None:
    """Inductor measures a kernel until it has seen 25 ms of GPU time."""
    for kind in list(vars(module).values()):
        if isinstance(kind, type) and issubclass(kind, module.Benchmarker):
            for name in {"benchmark", "benchmark_gpu"} & set(vars(kind)):
                setattr(kind, name, lambda *args, **kwargs: 1.0)


def _timed(module: Any) -> None:
    compile_it = module.compile_fx

    @functools.wraps(compile_it)
    def timed(*args: Any, **kwargs: Any) -> Any:
        record.notes.add(
            "torch.compile: kernels are compiled for the device and not timed, so the first candidate is taken"
        )
        began = time.perf_counter()
        try:
            return compile_it(*args, **kwargs)
        finally:
            spent = record.facts.get("compile_seconds", 0.0) + time.perf_counter() - began
            record.facts["compile_seconds"] = round(spent, 2)

    module.compile_fx = timed
