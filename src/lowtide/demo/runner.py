"""``lowtide demo``: two cases, each a table of methods and a training run; text or one JSON object."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import wrap

import torch

from lowtide.demo.cases import CASES, Case, NoWeightsError
from lowtide.demo.evidence import AS_FULL, FULL, Table, Training, measure_table, shape_of, train_both
from lowtide.device.names import device_name
from lowtide.reports.summary import percent
from lowtide.reports.terminal import columns
from lowtide.side_by_side import PLAIN, Row
from lowtide.units import format_bytes

# Shares of the time that was asked for, for each case. A slow machine measures fewer rounds and trains fewer steps.
_TABLE_SHARE, _TRAINING_SHARE = 0.35, 0.15
_METHODS = {
    PLAIN: "plain",
    FULL: "every layer checkpointed (transformers)",
    AS_FULL: "lowtide, as small as every layer",
}
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 100  # of a line that names what the machine calls itself


@dataclass(frozen=True)
class CaseResult:
    """One case's evidence; ``training`` is None until the training run is over."""

    name: str
    facts: str
    parameters: int
    batch: tuple[int, ...]
    table: Table
    training: Training | None
    seconds: float

    @property
    def holds(self) -> bool:
        """Every planned step gave the plain step's bits, in the table and in training."""
        return all(row.bitwise_equal for row in self.table.rows if row.predicted_peak_bytes is not None) and (
            self.training is None or (self.training.losses_bitwise_equal and self.training.weights_bitwise_equal)
        )


def run_demo(*, quick: bool, cases: Sequence[str], minutes: float = 1.0) -> Iterator[CaseResult]:
    """Yield each case twice, with its table as soon as that is measured, then with its training run.

    One thread computes: on a busy machine several wait for each other, and what is timed is that.

    Args:
        minutes: About how long all cases take together on a machine that has nothing else to do.

    Raises:
        BadUsageError: what the demo needs is not installed. Weights may be missing where another case is left.
    """
    rng, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    total_s = 0.0 if quick else 60 * minutes
    end = time.perf_counter() + total_s
    try:
        for name in cases:
            start = time.perf_counter()
            _say(name, "load the model")
            try:
                case = CASES[name](quick=quick)
            except NoWeightsError as error:
                if len(cases) == 1:
                    raise
                _say(name, f"left out, {error}")
                continue
            _say(name, "trace a step, plan it, measure the methods side by side")
            table = measure_table(case, min(_TABLE_SHARE * total_s, end - time.perf_counter()))
            parameters = sum(p.numel() for p in case.model.parameters())  # shared ones once
            seconds = time.perf_counter() - start
            result = CaseResult(case.name, case.facts, parameters, shape_of(case.batch), table, None, seconds)
            yield result
            start = time.perf_counter()
            _say(name, "train two copies, a plain one and one within the budget")
            left_s = min(_TRAINING_SHARE * total_s, end - time.perf_counter())
            training = train_both(case, _training_budget(case, table), left_s)
            yield replace(result, training=training, seconds=seconds + time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(rng)


def _say(case: str, what: str) -> None:
    print(f"lowtide demo, {case}: {what}", file=sys.stderr, flush=True)


def _training_budget(case: Case, table: Table) -> int | str:
    """One absolute budget for all shapes where the table's batch is the longest of them, else a fraction."""
    if shape_of(case.batch) not in map(shape_of, case.training):
        return case.training_budget
    row = next(row for row in table.rows if row.name.endswith(case.training_budget))
    assert row.budget_bytes is not None
    state_bytes = sum(2 * p.nbytes + 4 for p in case.model.parameters())  # AdamW: two moments and a step count
    return row.budget_bytes + state_bytes


def table_text(result: CaseResult) -> str:
    """The methods side by side."""
    table = result.table
    rows = [["one training step", "peak memory", "activations", "step time", "gradients"]]
    rows += [
        [
            _named(row),
            format_bytes(row.peak_bytes),
            f"{100 * row.fraction:.0f} %",
            f"{table.plain_ms:.0f} ms" if row is table.rows[0] else percent(row.time_ratio - 1),
            "reference" if row is table.rows[0] else "bitwise equal" if row.bitwise_equal else "DIFFERENT",
        ]
        for row in table.rows
    ]
    planned = [row for row in table.rows if row.predicted_peak_bytes is not None]
    rounds = "1 round" if table.rounds == 1 else f"median of {table.rounds} interleaved rounds"
    return "\n".join([
        f"{result.name}: {result.parameters / 1e6:.1f} M parameters, batch {result.batch[0]} x {result.batch[1]}",
        result.facts,
        "",
        *columns(rows),
        "",
        "Peak memory holds weights and gradients too. Activations: memory of the step itself, plain = 100 %.",
        *wrap(f"Step time: processor time of forward and backward, {rounds}, one thread of {device_name()}.", _WIDTH),
        f"Predicted before a planned step ran: {_predicted(planned)}.",
        f"Before that: {table.trace_s:.1f} s to trace the step, {table.measure_s:.1f} s to time its operators, "
        f"{table.solve_s:.1f} s for {len(planned)} plans.",
    ])  # fmt: skip


def _named(row: Row) -> str:
    if row.name in _METHODS:
        return _METHODS[row.name]
    share = row.name.rpartition(" ")[2]
    if 100 * row.fraction > float(share.rstrip("%")) + 1:
        return f"lowtide, the least there is: {share} is out of reach"
    return f"lowtide, {share} of the activations"


def _predicted(planned: Sequence[Row]) -> str:
    return " and ".join(
        f"{format_bytes(row.predicted_peak_bytes or 0)} at {percent(row.predicted_overhead or 0.0)}" for row in planned
    )


def training_text(result: CaseResult) -> str:
    """Both training runs."""
    training = result.training
    assert training is not None
    shapes = ", ".join(f"{rows} x {length}" for rows, length in training.shapes)
    losses = "same bits in every loss" if training.losses_bitwise_equal else "LOSSES DIFFER"
    weights = "in every weight at the end" if training.weights_bitwise_equal else "WEIGHTS DIFFER"
    return "\n".join([
        f"Trained twice from the same weights, {training.steps} steps of AdamW, batches {shapes}:",
        f"  plain    loss {_course(training.plain_losses)}",
        f"  lowtide  loss {_course(training.planned_losses)}"
        f"  budget {format_bytes(training.budget_bytes)}, AdamW's state included",
        f"  {losses} and {weights}",
    ])  # fmt: skip


def _course(losses: Sequence[float]) -> str:
    return f"{losses[0]:.4f} {sparkline(losses)} {losses[-1]:.4f}"


def sparkline(values: Sequence[float]) -> str:
    """One character a value, lowest to highest."""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def demo_json(results: list[CaseResult]) -> dict:
    """All results as one JSON object."""
    cases = [asdict(result) for result in results]
    for row in (row for case in cases for row in case["table"]["rows"]):
        row |= {"method": row.pop("name"), "cpu_time": row.pop("time_ratio")}
    return {
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "bitwise_equal": all(result.holds for result in results),
        "seconds": sum(result.seconds for result in results),
        "cases": cases,
    }
