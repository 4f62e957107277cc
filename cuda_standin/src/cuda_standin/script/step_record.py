"""A few more steps, for time: the host's time of steps that nothing disturbs, then one that is recorded.

The record is what the host asked of the device, in its order, with the host's time, without the stand-in's own work
(``csrc/runtime/step_record.h``). From it lowtide says what the step takes on a GPU.
"""

import contextlib
import time
from types import ModuleType
from typing import NamedTuple

from cuda_standin import control, loading
from cuda_standin.script import record, triton_kernels
from cuda_standin.script.request import Request

_UNDISTURBED = 2  # the faster one counts
_FILE = "step-{pid}.json"


class _Moment(NamedTuple):
    """Of the host's clock, which leaves out the stand-in's own work, and of others; nanoseconds."""

    host: int
    wall: int
    processor: int

    @classmethod
    def now(cls) -> "_Moment":
        return cls(control.host_clock_ns(), time.perf_counter_ns(), time.process_time_ns())

    def host_ns_since(self, before: "_Moment") -> int:
        """Without the time in which another process had the processor."""
        had = (self.processor - before.processor) / max(1, self.wall - before.wall)
        return round((self.host - before.host) * min(1.0, had))


class StepRecord:
    """Told of the end of each step, from the last one that memory is reported of on."""

    def __init__(self, torch: ModuleType, wanted: Request) -> None:
        self._torch = torch
        self._wanted = wanted
        self._host_ns: list[int] = []
        self._began = _Moment(0, 0, 0)
        self.steps = 0  # that have ended since
        self.runs = False

    def arm(self) -> None:
        """From CUDA's first use on: a graph that is captured is recorded, and what Triton's kernels work on."""
        if self._wanted.time:
            control.record_graphs()
            triton_kernels.install(self._torch)

    def begin(self) -> None:
        """There will be such steps. From now on nothing else looks at the script."""
        self.runs = True
        with contextlib.suppress(TypeError, RuntimeError):  # a PyTorch that records none
            self._torch.cuda.memory._record_memory_history(enabled=None)
        loading.values().standin_on_wait(None)
        self._began = _Moment.now()

    def step_ended(self) -> bool:
        """Whether that was the recorded step."""
        now = _Moment.now()
        self.steps += 1
        if self.steps <= _UNDISTURBED:
            self._host_ns.append(now.host_ns_since(self._began))
        if self.steps == _UNDISTURBED:
            triton_kernels.recording = True
            control.begin_step_record()
        elif self.steps > _UNDISTURBED:
            self._end()
            return True
        self._began = _Moment.now()
        return False

    def _end(self) -> None:
        triton_kernels.recording = False
        path = self._wanted.folder / _FILE.format(pid=record.process)
        control.end_step_record(path)
        record.facts["step_record"] = {"file": path.name, "host_ns": self._host_ns, "tf32": _tf32(self._torch)}


def _tf32(torch: ModuleType) -> bool:
    """Whether matrix products round float32 on the way in."""
    with contextlib.suppress(RuntimeError):  # the newer setting is in use
        return bool(torch.backends.cuda.matmul.allow_tf32)
    return getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee") == "tf32"
