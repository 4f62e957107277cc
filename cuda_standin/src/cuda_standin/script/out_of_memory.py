"""Each time that PyTorch says "out of memory": the step, the line, and what was asked for."""

import functools
import sys
from types import ModuleType
from typing import Any

from cuda_standin.script import labels, record
from cuda_standin.script.peaks import Peaks

_MOST = 20  # scripts that try smaller and smaller batches


def install(torch: ModuleType, peaks: Peaks) -> None:
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(functools.partial(_observed, torch, peaks))
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> Any:
        record.facts["error"] = f"{kind.__name__}: {error}"
        if isinstance(error, torch.cuda.OutOfMemoryError) and record.out_of_memory:
            record.out_of_memory[-1]["message"] = str(error)
        return before(kind, error, trace)

    sys.excepthook = hook


def _observed(torch: ModuleType, peaks: Peaks, device: int, asked: int, total: int, free: int) -> None:
    if len(record.out_of_memory) >= _MOST:
        return
    line, script_line = record.lines_of(record.main_frame())
    stats = peaks.current(device)
    labels.note(torch)
    record.out_of_memory.append(
        {
            "step": len(record.step_records) + 1,
            "line": line,
            "script_line": script_line,
            "asked_bytes": asked,
            "allocated_bytes": stats["allocated_bytes"]["all"]["current"],
            "reserved_bytes": stats["reserved_bytes"]["all"]["current"],
            "capacity_bytes": total,
            "message": "",
            "stack": record.stack_of(record.main_frame()),
        }
    )
    record.write()
