"""Measured and predicted step times of plans, beside the plain step; one JSON line per case and budget.

    python benchmarks/planner.py --time 7                all cases; more than an hour, on an idle machine
    python benchmarks/planner.py --time 7 --cases vit    these; lines of other cases in the results stay

Each case has a process of its own, which keeps the memory that it frees (``decoder.py``'s ``fixed``): else the cost of
page faults would depend on the peak, which no op's time includes. In it ops are measured, plans made and steps run in
turns on the same weights, one thread. A plan's time is process CPU time as a ratio to the plain step just before and
just after. ``none`` is a plan that changes nothing: its ratio shows the noise.

Exits with 1 where a plan is more than 3 points from what it predicts (toys aside), or something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from cases import CASES, SEED, Case, build
from decoder import MALLOC
from paired_times import PairedTimes, paired_times
from planner_lines import failed, solves, write
from provenance import provenance

RESULTS = Path(__file__).parent / "results" / "planner_time_cpu.jsonl"
MOST_POINTS_OFF = 3.0
LEFT_OUT = "least"  # takes minutes of search


def time_cases(cases: list[str], out: Path, *, rounds: int, quick: bool) -> int:
    """Time each case in a process of its own and write its lines to ``out``; 1 if a plan is too far off."""
    lines: list[dict] = []
    for name in cases:
        child = subprocess.run(
            [sys.executable, __file__, name, str(rounds), *(["--quick"] if quick else [])],
            env={**os.environ, **MALLOC["fixed"], "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        found = [json.loads(line) for line in child.stdout.splitlines()]
        if child.returncode:
            found.append({"case": name, "budget": "", "status": "failed", "error": f"exit code {child.returncode}"})
        lines += found
        for line in found:
            print(said(line), file=sys.stderr, flush=True)
        write(out, lines)
    print(f"wrote {out}", file=sys.stderr)
    off = [line for line in lines if not quick and abs(line.get("points_off", 0.0)) > MOST_POINTS_OFF]
    bad = [line for line in lines if line["status"] == "failed"]
    print(f"{len(lines)} lines, {len(off)} more than {MOST_POINTS_OFF} points off, {len(bad)} failed", file=sys.stderr)
    return 1 if off or bad else 0


def said(line: dict) -> str:
    start = f"{line['case']:<14} {line['budget']:<18}"
    if "overhead" not in line:
        return f"{start} {line['status']} {line.get('error', '')}"
    low, high = (100 * (q - line["overhead"]) for q in line["overhead_quartiles"])
    return (
        f"{start} predicted {100 * line['predicted_overhead']:+5.1f} %, measured {100 * line['overhead']:+5.1f} % "
        f"({low:+.1f} {high:+.1f}), off by {line['points_off']:+.1f}"
    )


def case_lines(name: str, *, rounds: int, quick: bool) -> Iterator[dict]:
    """One line per budget: predicted and measured overhead of a plan made in this process."""
    import torch

    import lowtide
    from lowtide.step.restore import preserve_training_state

    torch.set_num_threads(1)
    case = build(name, quick=quick)
    graph = lowtide.trace(case.model, case.batch, step=case.step)
    costs = lowtide.measure(graph)
    plans: dict[str, Any] = {}
    shared = {"benchmark": "planner_time_cpu", "case": name, "seed": SEED, "malloc": "fixed", "rounds": rounds}
    shared |= {"facts": case.facts, **provenance()}
    for budget, solve in solves(graph, costs):
        if budget == LEFT_OUT:
            continue
        try:
            plans[budget] = solve()
        except lowtide.BudgetInfeasibleError:
            yield shared | {"budget": budget, "status": "infeasible"}
        except Exception as error:
            yield shared | {"budget": budget} | failed(error)
    with preserve_training_state(case.model, case.batch):
        plain, _, ratios = compared(case, plans, rounds)
    for budget, plan in plans.items():
        ratio = ratios[budget]
        yield shared | {
            "budget": budget,
            "status": "ok",
            "method": plan.method,
            "plain_ms": plain.median_ms,
            "plain_ms_quartiles": plain.quartiles,
            "predicted_plain_ms": plan.plain_step_ms,
            "predicted_overhead": plan.predicted_overhead,
            "overhead": ratio.median_ms - 1,
            "overhead_quartiles": [q - 1 for q in ratio.quartiles],
            "points_off": 100 * (ratio.median_ms - 1 - plan.predicted_overhead),
        }


def compared(case: Case, plans: dict[str, Any], rounds: int) -> PairedTimes:
    """The plain step, and by budget the step under its plan with a plain step just before and just after."""
    planned = {budget: partial(step_ms, case, plan) for budget, plan in plans.items()}
    return paired_times(partial(step_ms, case), planned, rounds=rounds, seed=SEED, methods_per_baseline=1)


def step_ms(case: Case, plan: Any = None) -> float:
    """One step as in a training loop: under its plan before it begins, backward outside."""
    import lowtide
    from lowtide.measurement.timing import time_ms

    with ExitStack() as stack:
        if plan is not None:
            stack.enter_context(lowtide.apply(case.model, plan))

        def run() -> None:
            loss = case.step(case.model, case.batch)
            stack.close()
            loss.backward()

        return time_ms(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=tuple(CASES))
    parser.add_argument("rounds", type=int)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    for line in case_lines(args.case, rounds=args.rounds, quick=args.quick):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
