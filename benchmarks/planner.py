"""The planner on many architectures: error of the predicted peak, gap to the bound, solve time. JSON lines by case and
budget.

    python benchmarks/planner.py                      all cases of cases.py; 15 minutes
    python benchmarks/planner.py --cases t5 unet      these; lines of other cases in the results stay
    python benchmarks/planner.py --quick              toys of the same kinds, a test that it runs
    python benchmarks/planner.py --time 7             step times instead (planner_times.py)

Budgets are fractions of the plain step's activation memory, the peak of full checkpointing where layers repeat, and
the least that the planner says it can do. Each plan is carried out, and the plain step from the same state: loss,
gradients and buffers must be equal to the last bit, and the allocator's peak is compared with the simulated one.

Exits with 1 where gradients differ, something failed, or a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import planner_times
from cases import CASES, SEED, Case, build
from planner_lines import failed, solves, write
from provenance import provenance

RESULTS = Path(__file__).parent / "results" / "planner_cpu.jsonl"
MEDIAN_ERROR, WORST_ERROR = 0.001, 0.01  # of the measured peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--out", type=Path, help="default in results/; with --quick a temporary file")
    parser.add_argument("--quick", action="store_true", help="toys of the same kinds")
    parser.add_argument("--time", type=int, metavar="ROUNDS", help="time plans beside the plain step, nothing else")
    args = parser.parse_args()

    results = RESULTS if args.time is None else planner_times.RESULTS
    out = args.out or (Path(tempfile.mkdtemp()) / results.name if args.quick else results)
    if args.time is not None:
        return planner_times.time_cases(args.cases, out, rounds=args.time, quick=args.quick)

    import torch

    torch.set_num_threads(1)
    lines = []
    for name in args.cases:
        for line in case_lines(name, quick=args.quick):
            lines.append(line)
            print(said(line), file=sys.stderr, flush=True)
        write(out, lines)  # after each case, so that a run cut short leaves what it found
    print(f"wrote {out}", file=sys.stderr)
    return summary(lines)


def case_lines(name: str, *, quick: bool) -> Iterator[dict]:
    """One line per budget, or a single one that says why there is none."""
    import lowtide

    shared: dict[str, Any] = {"benchmark": "planner_cpu", "case": name, "seed": SEED, **provenance()}
    try:
        case = build(name, quick=quick)
        start = time.perf_counter()
        graph = lowtide.trace(case.model, case.batch, step=case.step)
        traced = time.perf_counter()
        costs = lowtide.measure(graph)
        shared |= {
            "facts": case.facts,
            "ops": len(graph.ops),
            "stored": len(graph.stored),
            "resident_bytes": graph.resident_bytes,
            "trace_s": traced - start,
            "measure_s": time.perf_counter() - traced,
        }
        plain = Outcome(case, graph.resident_bytes)
    except Exception as error:
        yield shared | failed(error) | {"budget": ""}
        return
    lowest: dict[str, int] = {}
    for budget, solve in solves(graph, costs):
        line: dict[str, Any] = {"budget": budget}
        try:
            start, start_cpu = time.perf_counter(), time.process_time()
            plan = solve()
            line["total_solve_s"] = time.perf_counter() - start  # of "least": with the search for what the least is
            line["solve_cpu_s"] = time.process_time() - start_cpu
            lowest[budget] = plan.predicted_peak_bytes
            if budget == "least" and plan.budget_bytes is not None:
                # Its own plan counts too: what lies below its budget was not the least.
                line["lower_elsewhere"] = {b: n for b, n in lowest.items() if n < plan.budget_bytes}
            yield shared | line | planned(case, plain, plan)
        except lowtide.BudgetInfeasibleError as error:
            yield (
                shared
                | line
                | {
                    "status": "infeasible",
                    "budget_bytes": error.budget_bytes,
                    "least_bytes": error.least_bytes,
                    "total_solve_s": time.perf_counter() - start,
                }
            )
        except Exception as error:
            yield shared | line | failed(error)


class Outcome:
    """One step of ``case``, planned or plain: its peak and its results by name. All state is restored afterwards."""

    def __init__(self, case: Case, resident_bytes: int, plan: Any = None) -> None:
        import torch

        import lowtide
        from lowtide.measurement.allocator import peak_bytes
        from lowtide.step.restore import preserve_training_state

        def run() -> None:
            with lowtide.apply(case.model, plan) if plan is not None else nullcontext() as applied:
                loss = case.step(case.model, case.batch)
            loss.backward()
            self.left["loss"] = loss.detach()
            self.unmatched_ops = 0 if applied is None else applied.counts.mismatched + applied.counts.unplanned

        self.left: dict[str, Any] = {}
        torch.manual_seed(SEED)
        with preserve_training_state(case.model, case.batch):
            self.peak_bytes = resident_bytes + peak_bytes(run)
            self.left |= {f"gradient of {n}": p.grad for n, p in case.model.named_parameters()}
            self.left |= {f"buffer {n}": b.clone() for n, b in case.model.named_buffers()}

    def differing(self, other: Outcome) -> list[str]:
        """Names of what is not equal to the last bit."""
        from lowtide.step.bits import same_bits

        def same(a: Any, b: Any) -> bool:
            return a is b or (a is not None and b is not None and same_bits(a, b))

        return [name for name, tensor in self.left.items() if not same(tensor, other.left[name])]


def planned(case: Case, plain: Outcome, plan: Any) -> dict:
    """Carry ``plan`` out, and compare it with the plain step from the same state."""

    ours = Outcome(case, plan.resident_bytes, plan)
    differing = plain.differing(ours)
    off = abs(plan.predicted_peak_bytes - ours.peak_bytes)
    line = {
        "status": "gradients differ" if differing else "ok",
        "method": plan.method,
        "plan_status": plan.status,
        "budget_bytes": plan.budget_bytes,
        "plain_peak_bytes": plain.peak_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "measured_peak_bytes": ours.peak_bytes,
        "peak_error": off / ours.peak_bytes,
        "activation_error": off / max(1, ours.peak_bytes - plan.resident_bytes),
        "fraction": plan.predicted_fraction,
        "predicted_overhead": plan.predicted_overhead,
        "gap": None if plan.bound_ms is None else plan.gap,
        "solve_s": plan.solve_s,
        "bitwise_equal": not differing,
        "differing": differing[:5],
        "recomputed": plan.counts["recompute"],
        "unmatched_ops": ours.unmatched_ops,
    }
    if plan.budget_bytes is not None and plan.predicted_peak_bytes > plan.budget_bytes:
        line["status"] = "over budget"
    return line


def said(line: dict) -> str:
    start = f"{line['case']:<14} {line['budget']:<18} {line['status']:<10}"
    if "peak_error" not in line:
        return f"{start} {line.get('error', '')}{line.get('least_bytes', '')}"
    gap = "" if line["gap"] is None else f"gap {100 * line['gap']:.3f} %, "
    return (
        f"{start} {line['fraction']:.3f} of plain, {100 * line['predicted_overhead']:+.1f} %, {gap}"
        f"{line['total_solve_s']:.2f} s, peak off by {100 * line['peak_error']:.4f} % "
        f"{'lower elsewhere: ' + str(line['lower_elsewhere']) if line.get('lower_elsewhere') else ''}"
    )


def summary(lines: list[dict]) -> int:
    """Print worst and median to stderr; return 1 on a finding."""
    ran = [line for line in lines if "peak_error" in line]
    findings = [line for line in lines if line["status"] not in ("ok", "infeasible") or line.get("lower_elsewhere")]

    def worst(field: str) -> str:
        having = [line for line in lines if line.get(field) is not None]
        if not having:
            return "none"
        line = max(having, key=lambda line: line[field])
        number = f"{line[field]:.1f} s" if field.endswith("_s") else f"{100 * line[field]:.4f} %"
        return f"{number} ({line['case']}, {line['budget']})"

    median = statistics.median([line["peak_error"] for line in ran]) if ran else float("nan")
    print(
        f"{len(ran)} plans of {len({line['case'] for line in ran})} cases\n"
        f"  |simulated - measured| / measured peak  median {100 * median:.4f} %, worst {worst('peak_error')}\n"
        f"  the same of activation memory           worst {worst('activation_error')}\n"
        f"  gap                                     worst {worst('gap')}\n"
        f"  solve                                   worst {worst('total_solve_s')}\n"
        f"  findings                                {len(findings)}",
        file=sys.stderr,
    )
    for line in findings:  # with a plan below "the least" the least is wrong, not the plan
        print(f"    {said(line)}", file=sys.stderr)
    met = bool(ran) and median <= MEDIAN_ERROR and max(line["peak_error"] for line in ran) <= WORST_ERROR
    return 0 if met and not findings else 1


if __name__ == "__main__":
    sys.exit(main())
