"""``lowtide demo``: two cases, each a table of methods and a training run; text or one JSON object."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from lowtide.demo.cases import CASES, Case
from lowtide.demo.evidence import Table, Training, measure_table, shape_of, train_both
from lowtide.device.names import device_name
from lowtide.reports.summary import percent
from lowtide.reports.terminal import columns
from lowtide.units import format_bytes

# A slow machine measures fewer rounds and trains fewer steps, so that the whole stays within minutes.
_TOTAL_S = 230.0
_TABLE_S = {"minilm": 25.0, "decoder": 65.0}
_TRAINING_S = {"minilm": 25.0, "decoder": 50.0}
_BARS = "▁▂▃▄▅▆▇█"


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


def run_demo(*, quick: bool, cases: Iterable[str]) -> Iterator[CaseResult]:
    """Yield each case's result as it is done; what it does goes to stderr.

    Raises:
        BadUsageError: what the demo needs is not installed.
    """
    rng = torch.get_rng_state()
    end = 0.0 if quick else time.perf_counter() + _TOTAL_S
    try:
        for name in cases:
            start = time.perf_counter()
            _say(f"{name}: load")
            case = CASES[name](quick=quick)
            parameters = sum(p.numel() for p in case.model.parameters())  # shared ones once
            _say(f"{name}: methods side by side")
            table = measure_table(case, min(_TABLE_S[name], 0.6 * (end - time.perf_counter())))
            _say(f"{name}: training")
            left_s = end - time.perf_counter()
            training = train_both(case, _training_budget(case, table), min(_TRAINING_S[name], left_s))
            seconds = time.perf_counter() - start
            yield CaseResult(case.name, case.facts, parameters, shape_of(case.batch), table, training, seconds)
    finally:
        torch.set_rng_state(rng)


def _say(what: str) -> None:
    print(f"lowtide demo, {what}", file=sys.stderr, flush=True)


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
    rows = [["method", "peak", "predicted", "activations", "CPU time", "predicted", "gradients"]]
    for row in table.rows:
        rows.append([
            row.method,
            format_bytes(row.peak_bytes),
            format_bytes(row.predicted_peak_bytes) if row.predicted_peak_bytes is not None else "",
            f"{100 * row.fraction:.1f} %",
            f"{table.plain_ms:.0f} ms" if row is table.rows[0] else percent(row.cpu_time - 1),
            percent(row.predicted_overhead) if row.predicted_overhead is not None else "",
            "reference" if row is table.rows[0] else "bitwise equal" if row.bitwise_equal else "DIFFERENT",
        ])  # fmt: skip
    first, last = training.plain_losses[0], training.plain_losses[-1]
    same = "the same bits in every loss" if training.losses_bitwise_equal else "LOSSES DIFFER"
    weights = "in every weight at the end" if training.weights_bitwise_equal else "WEIGHTS DIFFER"
    shapes = ", ".join(f"{rows} x {length}" for rows, length in training.shapes)
    budget = f"  within {format_bytes(training.budget_bytes)} with AdamW's state"
    rounds = "1 interleaved round" if table.rounds == 1 else f"median of {table.rounds} interleaved rounds"
    return "\n".join([
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
    ])  # fmt: skip


def sparkline(values: Sequence[float]) -> str:
    """One character a value, lowest to highest."""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


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
