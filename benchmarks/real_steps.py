"""Training loops as people write them, with ``lowtide.fit(model, budget=...)`` and without: one JSON line a case.

    python benchmarks/real_steps.py                       all cases; about a quarter of an hour
    python benchmarks/real_steps.py --cases trainer       some of them: the other lines of the file stay
    python benchmarks/real_steps.py --quick               a few steps of each, nothing written unless --out says where

The budget is 40 % of the largest plain step's activation memory, plus what is resident, the optimizer's state and the
buckets of data parallelism too. Each case is a process of its own (two ranks: two processes), on one thread, and runs
its loop from the same seed

- without lowtide, with the allocator's peak of each step: this gives the budget;
- without, timed; with lowtide, timed; without, timed again;
- with lowtide, with the allocator's peak of each step, and once more where batches differ: all under one plan, made
  for a batch as large as any.

Timed runs have no profiler in them. The plan for a run is made beside that run: another run may have other plans.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from real_step_loops import LOOPS, SEED, Loop, Sizes
from result_lines import replace_lines
from step_probe import PHASES, Probe, StepRecord, resident_bytes

import lowtide
from lowtide.step.bits import same_bits
from lowtide.training.status import Status

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "real_steps_cpu.jsonl"
FRACTION = 0.40
SHORT = 0.25  # the shortest quarter of the steps
WARM_UP = 4  # batches as large as any, before the run under one plan
BUSY_LOAD = 1.5
LIMIT_S = 1200  # of one case

# What the project asks for: key of the line, relation, value, in words.
ASKED = (
    ("bitwise_equal", "is", True, "losses and weights equal"),
    ("largest_peak_share", "<=", 1.005, "largest step's peak / budget"),
    ("wall_ratio", "<=", 1.10, "wall / (plain + what the plans predict)"),
    ("planning_share", "<=", 0.01, "planning on the training thread / the run"),
    ("short_step_ratio", "<=", 0.90, "short batches / under one fixed plan"),
)


def main() -> int:
    args = _arguments()
    chosen = [loop for loop in LOOPS if args.cases is None or loop.name in args.cases]
    if args.here:
        torch.set_num_threads(1)
        print(json.dumps(line(chosen[0], quick=args.quick)), flush=True)
        return 0
    lines, failed = [], 0
    for loop in chosen:
        print(f"{loop.name} ...", file=sys.stderr, flush=True)
        for found in _in_processes(loop, quick=args.quick):
            lines.append(found)
            failed += found["status"] != "ok"
            print(told(found), file=sys.stderr, flush=True)
    if args.out is None:
        print("".join(json.dumps(found) + "\n" for found in lines), end="")
    else:
        _write(args.out, lines)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", choices=[loop.name for loop in LOOPS], metavar="CASE", help="some of them"
    )
    parser.add_argument("--out", type=Path, help=f"default {RESULTS.relative_to(HERE.parent)}; with --quick stdout")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--here", action="store_true", help="one case, in this process, its line to stdout")
    args = parser.parse_args()
    if args.out is None and not args.quick:
        args.out = RESULTS
    return args


def _write(out: Path, lines: list[dict]) -> None:
    replace_lines(out, lines, by="case", order=[loop.name for loop in LOOPS])


def _in_processes(loop: Loop, *, quick: bool) -> list[dict]:
    """The case's line, one for each rank; a case that fails or hangs has one that says so."""
    command = [sys.executable, __file__, "--here", "--cases", loop.name, *(["--quick"] if quick else [])]
    with socket.socket() as free, tempfile.TemporaryDirectory() as cache:
        free.bind(("127.0.0.1", 0))
        shared = {
            **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LOWTIDE_CACHE_DIR": cache,
            "WORLD_SIZE": str(loop.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]),
        }  # fmt: skip
        free.close()
        ranks = [
            subprocess.Popen(
                command, env={**shared, "RANK": str(rank)}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for rank in range(loop.ranks)
        ]
        return [_line_of(process, loop, rank) for rank, process in enumerate(ranks)]


def _line_of(process: subprocess.Popen, loop: Loop, rank: int) -> dict:
    try:
        out, errors = process.communicate(timeout=LIMIT_S)
        status = f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        status = f"no end after {LIMIT_S} s"
    if process.returncode == 0:
        return json.loads(out.splitlines()[-1])
    failure = {"benchmark": "real_steps_cpu", "case": loop.name, "rank": rank, "status": status}
    return failure | {"error": errors.splitlines()[-20:]} | provenance()


# -- one case -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        weights: State dict at the end.
        wall_s, cpu_s: Of the whole loop: evaluation, optimizer and data included; ``cpu_s`` of its thread alone.
        status, plans: Of the fit; None and empty without one.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]
    wall_s: float
    cpu_s: float
    probe: Probe
    status: Status | None
    plans: list[dict[str, Any]]

    @property
    def records(self) -> list[StepRecord]:
        return self.probe.records

    def same_as(self, other: Run) -> bool:
        """Losses and weights to the last bit."""
        tensors = zip(self.weights.values(), other.weights.values(), strict=True)
        losses = same_bits(torch.tensor(self.losses), torch.tensor(other.losses))
        return losses and all(same_bits(a, b) for a, b in tensors)


def line(loop: Loop, *, quick: bool = False) -> dict:
    """Run the case in this process and measure it."""
    if loop.ranks > 1:
        torch.distributed.init_process_group("gloo")
    load = os.getloadavg()[0]
    sizes = loop.sizes(loop.quick_steps if quick else loop.steps)
    largest = [tuple(map(max, zip(*sizes)))] * WARM_UP
    reference = _run(loop, sizes, peaks=True)
    model_bytes = resident_bytes(loop.make(), gradients_to_come=True) + reference.probe.beside_bytes
    activation_bytes = max(_activation_bytes(record) for record in reference.records)
    batch_bytes = max(record.resident_bytes for record in reference.records) - model_bytes
    budget = model_bytes + max(0, batch_bytes) + int(FRACTION * activation_bytes)
    before = _run(loop, sizes)
    timed = _run(loop, sizes, budget=budget)
    after = _run(loop, sizes)
    measured = _run(loop, sizes, budget=budget, peaks=True)
    fixed = _run(loop, largest + sizes, budget=budget, max_plans=1, waits_after=1) if loop.varies else None
    if loop.ranks > 1:
        torch.distributed.destroy_process_group()
    assert timed.status is not None and measured.status is not None
    return {
        "benchmark": "real_steps_cpu", "case": loop.name, "rank": int(os.environ.get("RANK", 0)), "status": "ok",
        "batches": len(sizes), "distinct_sizes": len(set(sizes)), "seed": SEED, "fraction": FRACTION,
        "budget_bytes": budget, "resident_bytes": model_bytes, "plain_activation_bytes": activation_bytes,
        "plain_repeats_itself": reference.same_as(before) and reference.same_as(after),
        "bitwise_equal": reference.same_as(timed) and reference.same_as(measured),
        **_peaks(measured, budget),
        **_times(before, timed, after),
        **({} if fixed is None else _short_steps(timed.records, fixed.records[WARM_UP:])),
        "fit": timed.status.to_dict(), "plans": timed.plans, "fit_with_peaks": measured.status.to_dict(),
        "load_before": load, "load_after": os.getloadavg()[0], "busy_machine": load > BUSY_LOAD,
        **provenance(),
    }  # fmt: skip


def _run(
    loop: Loop, sizes: Sizes, *, budget: int | None = None, peaks: bool = False, waits_after: int | None = None,
    max_plans: int = 8,
) -> Run:  # fmt: skip
    torch.manual_seed(SEED)
    model = loop.make()
    if loop.ranks > 1:
        torch.distributed.barrier()
    fit = None if budget is None else lowtide.fit(model, budget=budget, max_plans=max_plans)
    probe = Probe(model, fit, peaks=peaks, waits_after=waits_after)
    try:
        with probe.installed():
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            losses = loop.train(model, probe, sizes)
            wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
        status = None if fit is None else fit.status()
        plans = [] if fit is None else [_described(planned) for planned in fit._lifecycle.plans_by_shape.plans]
    finally:
        if fit is not None:
            fit.remove()
    return Run(losses, model.state_dict(), wall_s, cpu_s, probe, status, plans)


def _described(planned: Any) -> dict[str, Any]:
    plan = planned.plan
    return {
        "sizes": [shape.sizes for shape in planned.shapes], "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_overhead": plan.predicted_overhead, "counts": plan.counts, "plan_status": plan.status,
        "mismatched": planned.tape.counts.mismatched,
    }  # fmt: skip


def _activation_bytes(record: StepRecord) -> int:
    assert record.peak_bytes is not None
    return record.peak_bytes - record.resident_bytes


# -- what comes of it -----------------------------------------------------------------------------------------------


def _peaks(run: Run, budget: int) -> dict[str, Any]:
    """Each step's peak as a share of the budget; the largest in each phase, and how many steps were above it."""
    shares = [(record.phase, (record.peak_bytes or math.nan) / budget) for record in run.records]
    by_phase = {phase: [share for p, share in shares if p == phase] for phase in PHASES}
    return {
        "largest_peak_share": max(share for _, share in shares),
        "largest_peak_share_by_phase": {phase: max(found) for phase, found in by_phase.items() if found},
        "steps_above_by_phase": {phase: sum(s > 1.005 for s in found) for phase, found in by_phase.items() if found},
        "peak_shares": [round(share, 4) for _, share in shares],
        "phases": "".join(phase[0] if phase != "planned" else "P" for phase, _ in shares),
    }


def _times(before: Run, timed: Run, after: Run) -> dict[str, Any]:
    """Seconds of the run with lowtide beside the mean of those around it.

    ``wall_ratio`` and ``cpu_ratio_to_plans``: of what it took and what it should: plain, and for each planned step what
    its plan predicts besides.
    """
    steps = list(zip(before.records, timed.records, after.records, strict=True))
    walls = [(b.wall_s + a.wall_s) / 2 for b, _, a in steps]
    cpus = [(b.cpu_s + a.cpu_s) / 2 for b, _, a in steps]
    extra_wall_s = sum(s * t.plan_overhead for s, (_, t, _) in zip(walls, steps))
    extra_cpu_s = sum(s * t.plan_overhead for s, (_, t, _) in zip(cpus, steps))
    plain_wall_s, plain_cpu_s = (before.wall_s + after.wall_s) / 2, (before.cpu_s + after.cpu_s) / 2
    planning, letters = timed.probe.planning, timed.probe.letters
    return {
        "steps_by_phase": dict(Counter(t.phase for _, t, _ in steps)),
        "plain_wall_s": plain_wall_s, "wall_s": timed.wall_s, "plain_wall_apart": after.wall_s / before.wall_s,
        "plain_cpu_s": plain_cpu_s, "cpu_s": timed.cpu_s, "cpu_ratio": timed.cpu_s / plain_cpu_s,
        "wall_ratio": timed.wall_s / (plain_wall_s + extra_wall_s),
        "cpu_ratio_to_plans": timed.cpu_s / (plain_cpu_s + extra_cpu_s),
        "predicted_extra_s": extra_wall_s,
        "step_cpu_ratio_by_phase": {
            phase: statistics.median(t.cpu_s / s for s, (_, t, _) in zip(cpus, steps) if t.phase == phase)
            for phase in PHASES if any(t.phase == phase for _, t, _ in steps)
        },
        "planned_cpu_ratio_to_plans": _median(
            t.cpu_s / (s * (1 + t.plan_overhead)) for s, (_, t, _) in zip(cpus, steps) if t.phase == "planned"
        ),
        "planning_cpu_s": planning.cpu_s, "planning_wall_s": planning.wall_s,
        "planning_share": planning.wall_s / timed.wall_s, "letters_cpu_s": letters.cpu_s,
    }  # fmt: skip


def _short_steps(own: Sequence[StepRecord], fixed: Sequence[StepRecord]) -> dict[str, Any]:
    """Short batches in the second half of the run: under plans of their own, and under the one of the largest batch."""
    limit = sorted(record.size for record in own)[int(SHORT * len(own))]
    pairs = [
        (a, b) for a, b in list(zip(own, fixed, strict=True))[len(own) // 2 :]
        if a.size <= limit and a.phase == b.phase == "planned"
    ]  # fmt: skip
    return {
        "short_steps": len(pairs),
        "short_step_s": _median(a.cpu_s for a, _ in pairs),
        "short_step_fixed_s": _median(b.cpu_s for _, b in pairs),
        "short_step_ratio": _median(a.cpu_s / b.cpu_s for a, b in pairs),
        "fixed_steps_by_phase": dict(Counter(b.phase for b in fixed)),
    }


def _median(values: Any) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def told(found: dict) -> str:
    """What was asked and what was found, a line each."""
    name = f"{found['case']}, rank {found['rank']}"
    if found["status"] != "ok":
        return "\n".join([f"{name}: {found['status']}", *found["error"]])
    busy = ", on a busy machine" if found["busy_machine"] else ""
    text = [f"{name}: {found['steps_by_phase']}{busy}"]
    for key, relation, asked, words in ASKED:
        if key in found:
            value = found[key]
            shown = f"{value:.4f}" if isinstance(value, float) else str(value)
            text.append(f"  {words:<44} {shown:>8}   asked: {relation} {asked}")
    text += [f"  {phase:<44} {share:8.4f}" for phase, share in found["largest_peak_share_by_phase"].items()]
    return "\n".join([*text, *(f"  {reason}" for reason in found["fit"]["reasons"])])


if __name__ == "__main__":
    sys.exit(main())
