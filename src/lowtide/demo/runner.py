"""``lowtide demo``: two cases, each a table of methods and a training run; text or one JSON object."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lowtide.demo.case import Case, shape_of
from lowtide.demo.decoder import decoder_case
from lowtide.demo.extras import MissingExtraError as MissingExtraError
from lowtide.demo.minilm import minilm_case
from lowtide.demo.table import Table, measure_table
from lowtide.demo.training import Training, sparkline, train_both
from lowtide.measurement.device import device_name
from lowtide.reports.summary import percent
from lowtide.reports.terminal import columns
from lowtide.units import format_bytes

CASES: dict[str, Callable[..., Case]] = {"minilm": minilm_case, "decoder": decoder_case}
# A slow machine measures fewer rounds and trains fewer steps, so that the whole stays within minutes.
_TOTAL_S = 230.0
_TABLE_S = {"minilm": 25.0, "decoder": 65.0}
_TRAINING_S = {"minilm": 25.0, "decoder": 50.0}


@dataclass(frozen=True)
class CaseResult:
    """One case's evidence."""

    name: str
    facts: str
    parameters: int
    batch: tuple[int, ...]
    table: Table
    training: Training
    seconds: float

    @property
    def holds(self) -> bool:
        """Every planned step gave the plain step's bits, in the table and in training."""
        return (
            all(row.bitwise_equal for row in self.table.rows if row.predicted_peak_bytes is not None)
            and self.training.losses_bitwise_equal
            and self.training.weights_bitwise_equal
        )


class Bar:
    """A progress bar on stderr that counts training steps; where no terminal is, a line for each stage."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._terminal = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
            TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=0)
        self._total = 0

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, what: str) -> None:
        self._total = 0
        self._progress.reset(self._task, description=what, total=None)
        if not self._terminal:
            print(f"lowtide demo, {what}", file=sys.stderr, flush=True)

    def expect(self, count: int) -> None:
        self._total += count
        self._progress.update(self._task, total=self._total)

    def done(self) -> None:
        self._progress.advance(self._task)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()


def run_demo(*, quick: bool = False, cases: tuple[str, ...] = tuple(CASES)) -> Iterator[CaseResult]:
    """Yield each case's result as it is done.

    Raises:
        MissingExtraError: what the demo needs is not installed.
    """
    rng = torch.get_rng_state()
    end = 0.0 if quick else time.perf_counter() + _TOTAL_S
    try:
        with Bar() as bar:
            for name in cases:
                result = _run_case(name, quick, end, bar)
                with bar.paused():  # the caller prints
                    yield result
    finally:
        torch.set_rng_state(rng)


def _run_case(name: str, quick: bool, end: float, bar: Bar) -> CaseResult:
    """One case; ``end`` is when the whole demo should be over."""
    start = time.perf_counter()
    bar.begin(f"{name}: load")
    case = CASES[name](quick=quick)
    bar.begin(f"{name}: methods side by side")
    left_s = end - time.perf_counter()
    table = measure_table(case, min(_TABLE_S[name], 0.6 * left_s), bar)
    bar.begin(f"{name}: training")
    left_s = end - time.perf_counter()
    training = train_both(case, _training_budget(case, table), min(_TRAINING_S[name], left_s), bar)
    seconds = time.perf_counter() - start
    return CaseResult(case.name, case.facts, case.parameters, shape_of(case.batch), table, training, seconds)


def _training_budget(case: Case, table: Table) -> int | str:
    """One absolute budget for all shapes where the table's batch is the longest of them, else a fraction."""
    if shape_of(case.batch) not in map(shape_of, case.training):
        return case.training_budget
    row = next(row for row in table.rows if row.method.endswith(case.training_budget))
    assert row.budget_bytes is not None
    state_bytes = sum(2 * p.nbytes + 4 for p in case.model.parameters())  # AdamW: two moments and a step count
    return row.budget_bytes + state_bytes


def case_text(result: CaseResult) -> str:
    """The table and the training run of one case."""
    table, training = result.table, result.training
    head = ["method", "peak", "predicted", "activations", "CPU time", "predicted", "gradients"]
    rows = [head]
    for row in table.rows:
        planned = row.predicted_peak_bytes is not None and row.predicted_overhead is not None
        rows.append([
            row.method,
            format_bytes(row.peak_bytes),
            format_bytes(row.predicted_peak_bytes) if row.predicted_peak_bytes is not None else "",
            f"{100 * row.fraction:.1f} %",
            f"{table.plain_ms:.0f} ms" if row is table.rows[0] else percent(row.cpu_time - 1),
            percent(row.predicted_overhead) if planned and row.predicted_overhead is not None else "",
            "reference" if row is table.rows[0] else "bitwise equal" if row.bitwise_equal else "DIFFERENT",
        ])  # fmt: skip
    first, last = training.plain_losses[0], training.plain_losses[-1]
    same = "the same bits in every loss" if training.losses_bitwise_equal else "LOSSES DIFFER"
    weights = "in every weight at the end" if training.weights_bitwise_equal else "WEIGHTS DIFFER"
    shapes = ", ".join(f"{rows} x {length}" for rows, length in training.shapes)
    budget = (
        "" if training.budget_bytes is None else f"  within {format_bytes(training.budget_bytes)} with AdamW's state"
    )
    rounds = "1 interleaved round" if table.rounds == 1 else f"median of {table.rounds} interleaved rounds"
    lines = [
        f"{result.name}: {result.parameters / 1e6:.1f} M parameters, batch {result.batch[0]} x {result.batch[1]}",
        result.facts,
        "",
        *columns(rows),
        f"CPU time: {rounds}. Trace {table.trace_s:.1f} s, "
        f"measure {table.measure_s:.1f} s, three solves {table.solve_s:.1f} s.",
        "",
        f"{training.steps} steps of AdamW, batches {shapes}: loss {first:.4f} to {last:.4f}",
        f"  plain    {sparkline(training.plain_losses)}",
        f"  lowtide  {sparkline(training.planned_losses)}{budget}",
        f"  {same} and {weights}",
    ]
    return "\n".join(lines)


def demo_json(results: list[CaseResult]) -> dict:
    """All results as one JSON object."""
    return {
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "bitwise_equal": all(result.holds for result in results),
        "seconds": sum(result.seconds for result in results),
        "cases": [asdict(result) for result in results],
    }
