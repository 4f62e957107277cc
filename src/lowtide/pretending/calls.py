"""``lowtide.pretend``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from lowtide.pretending import command_run, environments
from lowtide.pretending.outcome import PretendReport, outcome
from lowtide.pretending.settings import PretendSettings, amount
from lowtide.pretending.standin_package import memory_of


def pretend(
    command: Sequence[str], device: str = "h100", *, memory: int | str | None = None, ranks: int | None = None,
    rank: int = 0, steps: int | None = None, budget: int | str | None = None, torch: str | None = None,
    snapshot: str | Path | None = None, output: IO[str] | None = None, **more: Any,
) -> PretendReport:  # fmt: skip
    """Run a training script, as it is, on a GPU that is not there, and return what it takes and where it breaks.

    PyTorch is real, with its allocator and its choice of kernels; kernels do nothing. The command runs in processes of
    its own, and all of them are ended after ``steps`` optimizer steps.

    Args:
        command: As it is typed: ``["python", "train.py", "--batch-size", "8"]``, ``["torchrun", ...]``.
        device: A name of the table, such as ``"h100"``.
        memory: Of the device, in bytes or ``"40GiB"``; None: what it has.
        ranks: Of the job, of which ``rank`` alone runs; None: as the command's launcher says.
        steps: 0 runs the script to its own end; None: 3, or 6 with a budget.
        budget: lowtide is attached to the script with this budget.
        torch: A version of PyTorch, such as ``"2.6.0"``; None: the installed one.
        snapshot: A file for PyTorch's memory viewer (https://pytorch.org/memory_viz).
        output: Where the script's own output goes; None: where ours goes.
        more: ``host_budget``, ``values``, ``routing``, ``devices``, ``ranks_per_node``, ``history``, ``no_weights``,
            ``patience_s``; for the time of a step ``time``, ``tokens``, ``measured``, ``network_gbit``, ``clock``
            (``PretendSettings``).

    Raises:
        PretendError: The run cannot be what it was asked to be.
        UnknownDeviceError: ``device`` is not in the table.
        EnvironmentMissingError: PyTorch's CUDA build has to be brought first; the message has the command.
    """
    settings = PretendSettings(
        device=device, memory_bytes=None if memory is None else amount(str(memory), "memory"), ranks=ranks, rank=rank,
        steps=steps, budget=None if budget is None else str(budget), torch=torch,
        snapshot=None if snapshot is None else Path(snapshot), **more,
    )  # fmt: skip
    return run_pretended(command, settings, output)


def run_pretended(command: Sequence[str], settings: PretendSettings, output: IO[str] | None = None) -> PretendReport:
    """As ``pretend``, with settings that have been checked."""
    environment = environments.find(settings.torch)
    capacity = settings.memory_bytes or memory_of(settings.facts.name)
    if not settings.clock:
        return outcome(command_run.run(command, settings, environment, output), settings, environment, capacity)
    with open(os.devnull, "w") as nowhere:
        report = outcome(command_run.run(command, settings, environment, nowhere), settings, environment, capacity)
    if report.time is not None:
        clock_ms = (report.time.step_ms, report.time.host_ms)
        command_run.run(command, settings, environment, output, clock_ms=clock_ms)
    return report
