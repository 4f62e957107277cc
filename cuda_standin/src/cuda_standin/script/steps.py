"""Counts optimizer steps, measures each, and ends the process after as many as were asked for."""

import atexit
import contextlib
import functools
import sys
import time
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from cuda_standin import control, imports
from cuda_standin.script import clock, composition, labels, record
from cuda_standin.script.peaks import Peaks
from cuda_standin.script.request import Request
from cuda_standin.script.step_record import StepRecord

_LABELLED = 4  # steps whose addresses are noted: the highest peak of a steady run is among them


@dataclass
class _Began:
    """Where the present step began."""

    seconds: float = field(default_factory=time.perf_counter)
    cpu_seconds: float = field(default_factory=time.process_time)
    launches: int = 0
    waits: int = 0


class Steps:
    def __init__(self, torch: ModuleType, peaks: Peaks, wanted: Request) -> None:
        self._torch = torch
        self._peaks = peaks
        self._wanted = wanted
        self._began = _Began()
        self._counts: dict[int, int] = {}  # by optimizer
        self._timed = StepRecord(torch, wanted)
        torch.cuda._lazy_call(self._timed.arm)
        self._by_engine = False  # an engine of somebody counts, not its inner optimizers

    def before_optimizer(self, *_: Any) -> None:
        if self._timed.runs:
            return
        record.reached(f"optimizer step {len(record.step_records) + 1}")
        if len(record.step_records) < _LABELLED:
            labels.note(self._torch)

    def after_optimizer(self, optimizer: Any, *_: Any) -> None:
        if len(record.step_records) < _LABELLED and not self._timed.runs:
            labels.note(self._torch)
        if self._by_engine or not self._torch.cuda.is_initialized() or record.is_called_by_helper(sys._getframe(1)):
            return
        self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        # A second optimizer of the same step adds nothing: the step is the one that some optimizer takes first.
        if self._counts[id(optimizer)] > len(record.step_records) + self._timed.steps:
            self.count()

    def count(self) -> None:
        """A step has ended."""
        clock.step_ended()
        if self._timed.runs:
            if self._timed.step_ended():
                self._stop()
            return
        now, counters, peaks = _Began(), control.counters(), self._peaks.of_step()
        now.launches, now.waits = counters.launches, counters.waits
        record.step_records.append(
            {
                **peaks,
                "seconds": round(now.seconds - self._began.seconds, 4),
                "cpu_seconds": round(now.cpu_seconds - self._began.cpu_seconds, 4),
                "launches": now.launches - self._began.launches,
                "waits": now.waits - self._began.waits,
            }
        )
        labels.step_ends.append(time.time_ns() // 1000)
        done = 0 < self._wanted.steps <= len(record.step_records)
        if self._wanted.history and (done or len(record.step_records) == _LABELLED):
            composition.take(self._torch, self._wanted.snapshot)
            _end_history(self._torch)
        record.facts["counted"] = done  # what follows is for time alone
        if done and not self._wanted.time:
            self._stop()
        record.write()
        if done:
            self._timed.begin()
            return
        record.stops.clear()
        self._peaks.next_step()
        self._began = _Began(launches=now.launches, waits=now.waits)

    def _stop(self) -> None:
        record.facts["stopped"] = True
        record.write()
        raise SystemExit(0)  # not an Exception: a script that handles errors lets it pass

    def by_engine(self, owner: type, name: str, ends_step: Any) -> None:
        """From the first ``owner`` on, ``owner.name`` ends a step where ``ends_step(self)`` says so before the call."""
        method, make = getattr(owner, name), getattr(owner, "__init__")  # noqa: B009

        @functools.wraps(make)
        def made(engine: Any, *args: Any, **kwargs: Any) -> None:
            before, self._by_engine = self._by_engine, True
            make(engine, *args, **kwargs)
            self._by_engine = before or engine.optimizer is not None  # one that only evaluates takes no steps

        @functools.wraps(method)
        def counted(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self._by_engine = True
            ends = ends_step(engine)
            returned = method(engine, *args, **kwargs)
            if ends:
                self.count()
            return returned

        setattr(owner, name, counted)
        setattr(owner, "__init__", made)  # noqa: B010


def install(torch: ModuleType, peaks: Peaks, wanted: Request) -> None:
    from torch.optim import optimizer as optimizers

    steps = Steps(torch, peaks, wanted)
    optimizers.register_optimizer_step_pre_hook(steps.before_optimizer)
    optimizers.register_optimizer_step_post_hook(steps.after_optimizer)
    _note_stages(torch)
    # DeepSpeed's inner optimizers step once when they are made, and in groups.
    imports.after_import(
        "deepspeed.runtime.engine",
        lambda module: steps.by_engine(
            module.DeepSpeedEngine, "step", lambda engine: engine.is_gradient_accumulation_boundary()
        ),
    )
    imports.after_import(  # whose batches are steps
        "deepspeed.runtime.pipe.engine",
        lambda module: steps.by_engine(module.PipelineEngine, "train_batch", lambda engine: True),
    )
    _at_exit(torch, peaks, wanted)


def record_history(torch: ModuleType) -> None:
    """From CUDA's first use on; PyTorch 2.0 has another form."""
    record_it = torch.cuda.memory._record_memory_history
    try:
        record_it(enabled="all", context="alloc", stacks="python")
    except TypeError:
        try:
            record_it(True, trace_alloc_max_entries=1_000_000, trace_alloc_record_context=True)
        except TypeError:
            record.notes.add("this PyTorch records no history of allocations: what the peak consists of is not known")


def _end_history(torch: ModuleType) -> None:
    """Of later steps nothing is labelled, and the history of thousands would fill the host's memory."""
    with contextlib.suppress(TypeError):
        torch.cuda.memory._record_memory_history(enabled=None)


def _note_stages(torch: ModuleType) -> None:
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if len(record.step_records) >= _LABELLED:  # of later steps there is no history either
            torch.autograd.backward = backward
        record.reached("backward")
        line, script_line = record.lines_of(sys._getframe(1))
        record.backward_lines.append((time.time_ns() // 1000, script_line or line))
        return backward(*args, **kwargs)

    torch.autograd.backward = noted

    # Not a hook for all modules: torch.compile warns of those, and asks of them before each call.
    call = torch.nn.Module.__call__

    @functools.wraps(call)
    def first_call(*args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_initialized():
            if torch.nn.Module.__call__ is first_call:
                torch.nn.Module.__call__ = call
            record.reached("forward")
        return call(*args, **kwargs)

    torch.nn.Module.__call__ = first_call


def _at_exit(torch: ModuleType, peaks: Peaks, wanted: Request) -> None:
    def last() -> None:
        if not torch.cuda.is_initialized() or record.facts.get("counted"):
            return
        record.facts["after_last_step"] = peaks.of_step()
        if wanted.history and len(record.step_records) < _LABELLED:
            composition.take(torch, wanted.snapshot)
        record.write()

    def when_used() -> None:
        atexit.register(last)

    torch.cuda._lazy_call(when_used)
