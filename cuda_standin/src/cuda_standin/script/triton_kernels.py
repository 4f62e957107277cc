"""What Triton's kernels work on: Inductor's, and those that people write.

They are launched below PyTorch's operators. Where a step is recorded, or a graph captured, the next launch of this
thread is told the kernel's name and the sizes of its tensors.
"""

import functools
import json
from types import ModuleType
from typing import Any

from cuda_standin import imports, loading

recording = False


def install(torch: ModuleType) -> None:
    is_capturing = torch._C._cuda_isCurrentStreamCapturing

    def note(name: str, arguments: dict[str, Any], written_too: set[str]) -> None:
        if not recording and not is_capturing():
            return
        runtime = loading.runtime()
        runtime.standin_own_work(1)
        tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor) and value.is_cuda}
        told = {
            "op": "triton",
            "name": name,
            "shapes": [[list(t.shape), t.dtype.itemsize] for t in tensors.values()],
            "again_bytes": sum(
                t.nbytes for key, t in tensors.items() if key.startswith("in_out") or key in written_too
            ),
        }
        runtime.standin_record_next_kernel(json.dumps(told).encode())
        runtime.standin_own_work(0)

    def inductors(module: ModuleType) -> None:
        run = module.CachingAutotuner.run

        @functools.wraps(run)
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if recording or is_capturing():
                name = self.inductor_meta.get("kernel_name") or getattr(self.fn, "__name__", "triton")
                mutated = set(self.inductor_meta.get("mutated_arg_names", ()))
                note(name, dict(zip(self.fn.arg_names, args)), mutated)
            return run(self, *args, **kwargs)

        module.CachingAutotuner.run = noted

    def written_by_hand(module: ModuleType) -> None:
        run = module.JITFunction.run

        @functools.wraps(run)
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if recording or is_capturing():
                note(self.__name__, {**dict(zip(self.arg_names, args)), **kwargs}, set())
            return run(self, *args, **kwargs)

        module.JITFunction.run = noted

    imports.after_import("torch._inductor.runtime.triton_heuristics", inductors)
    imports.after_import("triton.runtime.jit", written_by_hand)
