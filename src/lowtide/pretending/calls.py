"""``lowtide.pretend``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from lowtide.pretending import command_run, environments
from lowtide.pretending.command_run import CommandRun, SentObjects
from lowtide.pretending.environments import ScriptEnvironment
from lowtide.pretending.outcome import PretendReport, outcome
from lowtide.pretending.outcome_facts import RankPeak
from lowtide.pretending.rank_runs import RankRuns
from lowtide.pretending.settings import PretendSettings, amount
from lowtide.pretending.standin_package import memory_of
from lowtide.pretending.step_time import StepTime


def pretend(
    command: Sequence[str], device: str = "h100", *, memory: int | str | None = None, ranks: int | None = None,
    rank: int | Sequence[int] = 0, steps: int | None = None, budget: int | str | None = None, torch: str | None = None,
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
        rank: Several run one after another, and the report is of the largest.
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
    each = (rank,) if isinstance(rank, int) else tuple(rank)
    settings = PretendSettings(
        device=device, memory_bytes=None if memory is None else amount(str(memory), "memory"), ranks=ranks,
        rank=each[0], steps=steps, budget=None if budget is None else str(budget), torch=torch,
        snapshot=None if snapshot is None else Path(snapshot), **more,
    )  # fmt: skip
    return run_pretended(command, settings, output, each)


def run_pretended(
    command: Sequence[str], settings: PretendSettings, output: IO[str] | None = None, each: Sequence[int] = ()
) -> PretendReport:
    """As ``pretend``, with settings that have been checked.

    Args:
        each: The ranks that run; none: ``settings.rank``.
    """
    every = list(_by_rank(settings, each or (settings.rank,)))  # each is checked before one runs
    environment = environments.find(settings.torch)
    with open(os.devnull, "w") as nowhere:

        def run(own: PretendSettings, sent: SentObjects) -> CommandRun:
            return command_run.run(command, own, environment, nowhere if own.clock or sent.to else output, sent=sent)

        def run_by_clock(own: PretendSettings, sent: SentObjects, time: StepTime) -> None:
            clock_ms = (time.step_ms, time.host_ms)
            command_run.run(command, own, environment, output, clock_ms=clock_ms, sent=sent)

        reports = []
        with RankRuns(run) as runs:
            for own in every:
                report = _of_rank(runs, own, environment)
                if own.clock and report.time is not None:
                    run_by_clock(own, runs.sent, report.time)
                reports.append(report)
    if len(reports) == 1:
        return reports[0]
    largest = max(reports, key=lambda report: (not report.fits, report.peak_reserved_bytes))
    return replace(largest, by_rank=tuple(RankPeak.of(report) for report in reports))


def _by_rank(settings: PretendSettings, each: Sequence[int]) -> Iterator[PretendSettings]:
    for rank in each:
        snapshot = settings.snapshot
        if snapshot is not None and len(each) > 1:
            snapshot = snapshot.with_stem(f"{snapshot.stem}-rank{rank}")
        yield replace(settings, rank=rank, snapshot=snapshot)


def _of_rank(runs: RankRuns, settings: PretendSettings, environment: ScriptEnvironment) -> PretendReport:
    capacity = settings.memory_bytes or memory_of(settings.facts.name)
    report = outcome(runs.of(settings), settings, environment, capacity)
    if not runs.ran_before:
        return report
    first = ", ".join(map(str, sorted(runs.ran_before)))
    return replace(report, notes=(*report.notes, f"Ranks that ran before it, for what they send: {first}."))
