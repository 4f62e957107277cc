"""torch.compile where nothing takes time: candidates are not raced, and how long compiling takes is said apart.

Inductor's kernels do nothing. What they would write holds what its memory held before, a loss that is not a number
perhaps, which ends some scripts: so small outputs are zeros, as those of skipped operators are.
"""

import ctypes
import functools
import os
import time
from typing import Any

from cuda_standin import imports
from cuda_standin.script import record

_SMALL = 1 << 16  # bytes: losses, norms, flags


def install() -> None:
    if "STANDIN_SKIP_BYTES" in os.environ:
        imports.after_import("torch._inductor.runtime.triton_heuristics", _zeros)
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


def _zeros(module: Any) -> None:
    run = module.CachingAutotuner.run

    @functools.wraps(run)
    def leaves_zeros(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not record.facts.get("counted"):  # what follows is for time alone
            kept = self.inductor_meta.get("mutated_arg_names", ())  # the graph's own inputs
            for name, tensor in zip(self.fn.arg_names, args):
                is_written = name.startswith(("out_ptr", "in_out_ptr")) and name not in kept
                if is_written and tensor.nbytes <= _SMALL and tensor.is_contiguous():
                    ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)
        return run(self, *args, **kwargs)

    module.CachingAutotuner.run = leaves_zeros
