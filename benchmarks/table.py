"""Write the benchmarks' tables into README and docs from the committed results; ``--check`` fails where they differ.

python benchmarks/table.py [--check]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ablation
import pretend_published_table
import pretend_table
import pretend_time_table
import published_table
from advice import QUESTIONS
from advice_text import answer_text, answers_origin
from changing_steps_table import changes_table, changing_summary, leaves_table
from compiled_table import compiled_cuda_table, compiled_full_size_table, compiled_table
from doctor_table import bugs_table, examples_table, zoo_table
from foreseen_gpu_table import foreseen_table, shares_table
from foresight_table import (
    claims_table,
    counted_table,
    foreseen_times_table,
    large_table,
    peaks_table,
    plans_table,
    ranks_table,
)
from foresight_table import zoo_table as hollow_zoo_table
from full_size_programs_table import full_size_programs_table
from full_size_table import example_text, full_size_summary, full_size_table
from generation_table import cache_table, gap_table
from gpu_loops_table import compiled_gpu_table, fit_table
from gpu_table import gpu_summary, gpu_table
from host_time_table import host_time_table
from integrations_table import cases_table, programs_table, timed_table
from limits_table import costs_table
from optimizers_table import optimizers_table
from real_steps_table import real_steps_table
from reserved_table import reserved_table
from true_steps_table import true_steps_cuda_summary, true_steps_cuda_table, true_steps_summary, true_steps_table

from lowtide.doctor import registry

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CHANGING = ROOT / "docs" / "changing-steps.md"
HOW_TO = ROOT / "docs" / "how-to"
MIB = 2**20
COLUMNS = (
    "method", "activations", "of plain", "predicted", "time", "time, malloc fixed", "predicted", "gap", "solve",
    "gradients",
)  # fmt: skip


@dataclass(frozen=True)
class Page:
    """A file with a table between ``<!-- mark:begin -->`` and ``<!-- mark:end -->``."""

    path: Path
    mark: str
    results: Path | None  # none where the table is made of the code, or before the first measurement
    table: Callable[[list[dict]], str]

    def written(self) -> str:
        """The page with its table made of the present results."""
        return replaced(self.path.read_text(), self.mark, self.table(read(self.results) if self.results else []))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a page differs")
    args = parser.parse_args()
    differing = 0
    measured_compiled = RESULTS / "compiled_cpu.jsonl"
    for page in (
        Page(ROOT / "README.md", "summary", RESULTS / "gpu.jsonl", gpu_summary),
        Page(ROOT / "docs" / "benchmarks.md", "benchmark", RESULTS / "decoder_cpu.jsonl", tables),
        Page(ROOT / "docs" / "benchmarks.md", "overhead", RESULTS / "overhead_cpu.jsonl", overhead_table),
        Page(ROOT / "docs" / "gpu.md", "gpu", RESULTS / "gpu.jsonl", gpu_table),
        Page(ROOT / "docs" / "gpu.md", "gpu fit", RESULTS / "gpu_loops.jsonl", fit_table),
        Page(ROOT / "docs" / "gpu.md", "gpu compiled", RESULTS / "gpu_loops.jsonl", compiled_gpu_table),
        Page(ROOT / "docs" / "benchmarks.md", "host time", RESULTS / "host_time.jsonl", host_time_table),
        Page(HOW_TO / "will-it-fit.md", "answers", RESULTS / "advice.jsonl", answers_origin),
        *(
            Page(HOW_TO / "will-it-fit.md", f"answer {name}", RESULTS / "advice.jsonl", partial(answer_text, name))
            for name in QUESTIONS
        ),
        Page(HOW_TO / "opaque-calls.md", "opaque", RESULTS / "opaque_cpu.jsonl", opaque_table),
        Page(
            ROOT / "docs" / "compiled.md",
            "compiled",
            measured_compiled if measured_compiled.exists() else None,
            compiled_table,
        ),
        Page(
            ROOT / "docs" / "compiled.md",
            "compiled cuda",
            cuda if (cuda := RESULTS / "compiled_cuda.jsonl").exists() else None,
            compiled_cuda_table,
        ),
        Page(
            ROOT / "docs" / "compiled.md",
            "compiled full size",
            RESULTS / "compiled_full_size.jsonl",
            compiled_full_size_table,
        ),
        Page(HOW_TO / "checkpoint-by-hand.md", "checkpoint", RESULTS / "checkpoint_calls_cpu.jsonl", checkpoint_table),
        Page(HOW_TO / "watch-real-steps.md", "real steps", RESULTS / "real_steps_cpu.jsonl", real_steps_table),
        Page(
            ROOT / "docs" / "changing-steps.md", "changing summary", RESULTS / "changing_steps.jsonl", changing_summary
        ),
        Page(CHANGING, "changing leaves", RESULTS / "changing_steps.jsonl", leaves_table),
        Page(CHANGING, "changing changes", RESULTS / "changing_steps.jsonl", changes_table),
        Page(ROOT / "docs" / "steps.md", "steps summary", RESULTS / "true_steps_cpu.jsonl", true_steps_summary),
        Page(ROOT / "docs" / "steps.md", "steps table", RESULTS / "true_steps_cpu.jsonl", true_steps_table),
        Page(ROOT / "docs" / "steps.md", "cuda summary", RESULTS / "true_steps_cuda.jsonl", true_steps_cuda_summary),
        Page(ROOT / "docs" / "steps.md", "cuda table", RESULTS / "true_steps_cuda.jsonl", true_steps_cuda_table),
        Page(HOW_TO / "long-sequences.md", "long", RESULTS / "long_sequences_cpu.jsonl", long_table),
        Page(ROOT / "docs" / "doctor.md", "checks", None, lambda _: registry.table()),
        Page(ROOT / "docs" / "doctor.md", "bugs", RESULTS / "doctor_bugs_cpu.jsonl", bugs_table),
        Page(ROOT / "docs" / "doctor.md", "zoo", RESULTS / "doctor_zoo_cpu.jsonl", zoo_table),
        Page(ROOT / "docs" / "doctor.md", "examples", RESULTS / "doctor_examples_cpu.jsonl", examples_table),
        Page(ROOT / "docs" / "claims.md", "claims", RESULTS / "claims.jsonl", claims_table),
        Page(ROOT / "docs" / "foresight.md", "peaks", RESULTS / "foresight_cpu.jsonl", peaks_table),
        Page(ROOT / "docs" / "foresight.md", "plans", RESULTS / "foresight_cpu.jsonl", plans_table),
        Page(ROOT / "docs" / "foresight.md", "zoo", RESULTS / "hollow_zoo_cpu.jsonl", hollow_zoo_table),
        Page(ROOT / "docs" / "foresight.md", "counted", RESULTS / "hollow_counted.json", counted_table),
        Page(ROOT / "docs" / "foresight.md", "optimizers", RESULTS / "optimizers.jsonl", optimizers_table),
        Page(ROOT / "docs" / "foresight.md", "reserved", RESULTS / "reserved_cuda.json", reserved_table),
        Page(ROOT / "docs" / "foresight.md", "large", RESULTS / "hollow_large_cpu.jsonl", large_table),
        Page(ROOT / "docs" / "foresight.md", "ranks", RESULTS / "parallel_peaks_cpu.jsonl", ranks_table),
        *(
            Page(ROOT / "docs" / "published.md", f"published {mark}", RESULTS / "published.json", table)
            for mark, table in (
                ("summary", published_table.summary),
                ("memory", published_table.memory),
                ("times", published_table.times),
                ("not created", published_table.not_created),
            )
        ),
        *(
            Page(ROOT / "docs" / "pretend-time.md", f"time {mark}", RESULTS / "pretend_time.json", table)
            for mark, table in (
                ("example", pretend_time_table.example),
                ("summary", pretend_time_table.summary),
                ("comparisons", pretend_time_table.comparisons),
                ("rows", pretend_time_table.times),
            )
        ),
        Page(ROOT / "docs" / "pretend-time.md", "foreseen gpu", RESULTS / "foreseen_gpu.json", foreseen_table),
        Page(ROOT / "docs" / "pretend-time.md", "operator shares", RESULTS / "operator_shares.json", shares_table),
        *(
            Page(HOW_TO / "pretend.md", f"pretend {at}", RESULTS / "pretend_example.json", partial(example_text, at))
            for at in ("h100", "l4")
        ),
        Page(
            HOW_TO / "pretend.md",
            "pretend versions",
            RESULTS / "pretend_published.json",
            pretend_published_table.versions,
        ),
        Page(ROOT / "docs" / "full-size.md", "full size summary", RESULTS / "full_size.jsonl", full_size_summary),
        Page(ROOT / "docs" / "full-size.md", "full size", RESULTS / "full_size.jsonl", full_size_table),
        *(
            Page(ROOT / "docs" / "pretend.md", f"pretend {mark}", RESULTS / "pretend_scripts.json", table)
            for mark, table in (
                ("summary", pretend_table.summary),
                ("runs", pretend_table.runs),
                ("not run", pretend_table.not_run),
                ("commands", pretend_table.commands),
            )
        ),
        *(
            Page(ROOT / "docs" / "pretend-published.md", mark, RESULTS / "pretend_published.json", table)
            for mark, table in (
                ("counted summary", pretend_published_table.summary),
                ("counted", pretend_published_table.measurements),
                ("counted errors", pretend_published_table.out_of_memory),
            )
        ),
        Page(HOW_TO / "generate-within-a-budget.md", "cache", RESULTS / "cache_offload.jsonl", cache_table),
        Page(HOW_TO / "generate-within-a-budget.md", "gap", RESULTS / "generation_gap_cpu.jsonl", gap_table),
        Page(ROOT / "docs" / "foresight.md", "times", RESULTS / "estimate_cpu.jsonl", foreseen_times_table),
        Page(ROOT / "docs" / "integrations.md", "integrations", RESULTS / "integrations_cpu.jsonl", cases_table),
        Page(ROOT / "docs" / "integrations.md", "programs", RESULTS / "programs_cpu.jsonl", programs_table),
        Page(
            ROOT / "docs" / "integrations.md",
            "full size programs",
            RESULTS / "full_size_programs.jsonl",
            full_size_programs_table,
        ),
        Page(ROOT / "docs" / "integrations.md", "timed", RESULTS / "integrations_cpu.jsonl", timed_table),
        Page(ROOT / "docs" / "limits.md", "costs", None, costs_table),
        Page(ROOT / "docs" / "offload.md", "offload", RESULTS / "offload_cpu.jsonl", offload_table),
        Page(ROOT / "docs" / "planner.md", "planner", RESULTS / "planner_cpu.jsonl", planner_table),
        Page(ROOT / "docs" / "planner.md", "times", RESULTS / "planner_time_cpu.jsonl", times_table),
        Page(ROOT / "docs" / "planner.md", "ablation", RESULTS / "ablation_cpu.jsonl", ablation_table),
    ):
        after = page.written()
        if page.path.read_text() == after:
            continue
        differing = 1
        if args.check:
            print(
                f"{page.path.name}'s table is not that of the results. Run: python benchmarks/table.py", file=sys.stderr
            )
        else:
            page.path.write_text(after)
    return differing if args.check else 0


def read(path: Path) -> list[dict]:
    """One dict per case, malloc mode and method; of a file that is one JSON object, that."""
    if path.suffix == ".json":
        found = json.loads(path.read_text())
        return found if isinstance(found, list) else [found]
    return [json.loads(line) for line in path.read_text().splitlines()]


def replaced(page: str, mark: str, table: str) -> str:
    """``page`` with the text between the markers replaced."""
    begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    head, found_begin, rest = page.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found_begin or not found_end:
        raise SystemExit(f"the page has no {begin} ... {end} to write between.")
    return f"{head}{begin}\n{table}\n{end}{tail}"


def tables(lines: list[dict]) -> str:
    """One table per case, its methods in the order run, both malloc modes side by side."""
    cases = list(dict.fromkeys(line["case"] for line in lines))
    return "\n\n".join([*(case_table([x for x in lines if x["case"] == case]) for case in cases), footnote(lines)])


def spread(line: dict) -> str:
    return overhead(line["time_ratio"] - 1, line["time_ratio_quartiles"])


def _dropping_table(lines: list[dict]) -> list[str]:
    """A row per method, the sizes side by side: what fitted steps take more than plain ones."""
    cases = list(dict.fromkeys(line["case"] for line in lines))
    found = {(line["method"], line["case"]): line for line in lines}
    rows = [f"| whole steps | {' | '.join(cases)} |", "|---|" + "---:|" * len(cases)]
    for method in dict.fromkeys(line["method"] for line in lines):
        cells = [
            overhead(found[method, case]["step_ratio"] - 1, found[method, case]["step_ratio_quartiles"])
            for case in cases
        ]
        rows.append(f"| {method} | {' | '.join(cells)} |")
        asked = [found[method, case]["asked_ratio"] for case in cases]
        if all(asked):
            rows.append(
                f"| asked: an eighth of every layer's and 2 % | {' | '.join(f'{100 * r - 100:.1f} %' for r in asked)} |"
            )
    plain = ", ".join(f"{line['plain_us'] / 1000:.1f} ms" for line in lines if line["method"] == lines[0]["method"])
    return [*rows, "", f"Linear, GELU, Linear in each layer; plain steps take {plain}. Process time, malloc fixed."]


def overhead_table(lines: list[dict]) -> str:
    """A row per method, the cases side by side: microseconds per op that forward and backward take more."""
    steps = [line for line in lines if "step_ratio" in line]
    compared = [line for line in lines if line not in steps and not line["case"].startswith("chain of")]
    cases = list(dict.fromkeys(line["case"] for line in compared))
    found = {(line["method"], line["case"]): line for line in compared}
    rows = [
        "| us an op | " + " | ".join(f"{case}, forward | {case}, backward" for case in cases) + " |",
        "|---|" + "---:|---:|" * len(cases),
    ]
    for method in dict.fromkeys(line["method"] for line in compared):
        cells = []
        for case in cases:
            line = found[method, case]
            back = line.get("backward_us", line.get("backward_us_per_op"))
            cells += [f"{line['forward_us']:+.1f}", f"{back:+.1f}"]
        rows.append(f"| {method} | {' | '.join(cells)} |")
    long = [line for line in lines if line["case"].startswith("chain of")]
    lengths = ", ".join(
        f"{line['ops']:,} ops +{line['forward_us']:.1f} and +{line['backward_us']:.1f}" for line in long
    )
    rows += [
        "",
        f"Backward: per op that runs again, beyond that op itself. Chains with everything replayed: {lengths}; "
        f"{max(line['bytes_per_recipe'] for line in long):.0f} bytes held per recipe at most. {long[0]['device']}, "
        f"1 thread, torch {long[0]['torch']}, commit {long[0]['commit']}.",
        "",
        *_dropping_table(steps),
    ]
    return "\n".join(rows)


def case_table(lines: list[dict]) -> str:
    default = {line["method"]: line for line in lines if line["malloc"] == "default"}
    fixed = {line["method"]: line for line in lines if line["malloc"] == "fixed"}
    plain = default["none"]
    rows = [
        f"**{plain['case'].capitalize()}**, plain step {plain['time_ms']:.0f} ms",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---|" + "---:|" * (len(COLUMNS) - 2) + "---|",
    ]
    for method, line in default.items():
        rows.append(f"| {method} | {' | '.join(cells(line, fixed.get(method)))} |")
    return "\n".join(rows)


def cells(line: dict, fixed: dict | None) -> list[str]:
    if line["status"] == "infeasible":
        return ["infeasible", *[""] * 8]
    ours = line.get("predicted_overhead") is not None
    predicted = f"{(line['predicted_peak_bytes'] - line['resident_bytes']) / MIB:.1f}" if ours else ""
    # Times were predicted in each process: these are of the one with malloc fixed.
    timed = fixed if fixed is not None and fixed["status"] != "infeasible" else None
    return [
        f"{line['activation_bytes'] / MIB:.1f} MiB",
        f"{line['fraction']:.3f}",
        f"{predicted} MiB" if ours else "",
        overhead(line["time_ratio"] - 1, line["time_ratio_quartiles"]),
        overhead(timed["time_ratio"] - 1, timed["time_ratio_quartiles"]) if timed else "",
        f"{100 * timed['predicted_overhead']:+.1f} %" if ours and timed else "",
        f"{line['gap']:.2%}".replace("%", " %") if ours and line["gap"] is not None else "",
        f"{line['solve_s']:.1f} s" if ours else "",
        "equal" if line["bitwise_equal"] else "**differ**",
    ]


def overhead(value: float, quartiles: list[float]) -> str:
    """``+4.9 %``, with half the distance between the quartiles as its spread."""
    return f"{100 * value:+.1f} % ± {100 * (quartiles[1] - quartiles[0]) / 2:.1f}"


def footnote(lines: list[dict]) -> str:
    first = lines[0]
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    return (
        f"Median of {first['rounds']} interleaved rounds ± half the quartile range, on {first['device']}, "
        f"{first['threads']} thread, torch {first['torch']}, transformers {first['transformers']}, commit {commits}. "
        "“Malloc fixed” keeps freed memory in the process (`MALLOC_MMAP_MAX_=0`, no trimming). Otherwise the plain "
        "step pays for more page faults, and lean plans look faster than they are. Predictions are for fixed malloc; "
        f"measured overheads differ by {points_off(lines)}."
    )


def points_off(lines: list[dict]) -> str:
    """Distance of measured from predicted overhead over all plans that recompute, malloc fixed."""
    off = sorted(
        100 * abs(line["time_ratio"] - 1 - line["predicted_overhead"])
        for line in lines
        if line["malloc"] == "fixed" and line.get("predicted_overhead")
    )
    if not off:
        return "nothing that was measured"
    return f"{statistics.median(off):.1f} points (median), {off[-1]:.1f} at most"


def checkpoint_table(lines: list[dict]) -> str:
    """A row per way of checkpointing each layer."""
    rows = ["| method | activations | of plain | step time | gradients |", "|---|---:|---:|---:|---|"]
    rows += [
        f"| {line['method']} | {line['activation_bytes'] / MIB:.1f} MiB | {line['fraction']:.3f} | {spread(line)} | "
        f"{'equal' if line['bitwise_equal'] else '**differ**'} |"
        for line in lines
    ]
    first = lines[0]
    return "\n".join([*rows, "", f"A {first['case']}, each layer checkpointed. {_medians(first)}"])


def opaque_table(lines: list[dict]) -> str:
    """A row per method; steps without a plan have no time of their own."""
    rows = ["| method | activations | of plain | step time | gradients |", "|---|---:|---:|---:|---|"]
    for line in lines:
        size = f"{line['activation_bytes'] / MIB:.1f} MiB" if "activation_bytes" in line else ""
        time = spread(line) if "time_ratio" in line else "a first step"
        equal = "equal" if line["bitwise_equal"] else "**differ**"
        rows.append(f"| {line['method']} | {size} | {line['fraction']:.3f} | {time} | {equal} |")
    return "\n".join([*rows, "", f"An {lines[0]['case']}. {_medians(lines[0])}"])


def long_table(lines: list[dict]) -> str:
    """A row per method: the longest sequence within the limit."""
    rows = ["| method | tokens | of plain | peak | CPU time of a step |", "|---|---:|---:|---:|---:|"]
    rows += [
        f"| {line['method']} | {line['tokens']:,} | {line['tokens'] / lines[0]['tokens']:.1f} x | "
        f"{line['peak_bytes'] / MIB:.1f} MiB | {1000 * line['step_s'] / line['tokens']:.2f} ms a token |"
        for line in lines
    ]
    first = lines[0]
    note = (
        f"The longest sequence within {first['limit_bytes'] / MIB:.0f} MiB, of which weights and gradients take "
        f"{first['resident_bytes'] / MIB:.0f}: a Llama-shaped model, {first['layers']} layers of {first['hidden']}, "
        f"vocabulary {first['vocabulary']:,}, {first['dtype']}, four tiles. Lengths are found to within a sixteenth. "
        f"{first['device']}, {first['threads']} thread, torch {first['torch']}, transformers {first['transformers']}, "
        f"commit {first['commit']}."
    )
    return "\n".join([*rows, "", note])


def _medians(line: dict) -> str:
    return (
        f"Process CPU time, medians of {line['rounds']} interleaved rounds beside the plain step, ± half the quartile "
        f"range. {line['device']}, {line['threads']} thread, torch {line['torch']}, transformers "
        f"{line['transformers']}, commit {line['commit']}."
    )


OFFLOAD_WAYS = {"recompute": "recomputing alone", "disk": "with the disk"}


def offload_table(lines: list[dict]) -> str:
    """A row per budget, the ways side by side: elapsed time more than the plain step's, predicted and measured."""
    rows = []
    for case in dict.fromkeys(line["case"] for line in lines):
        mine = [line for line in lines if line["case"] == case]
        plain = next(line for line in mine if line["way"] == "plain")
        found = {(line["budget"], line["way"]): line for line in mine}
        rows += [
            f"**{case}**, plain step {plain['elapsed_ms']:.0f} ms, activations "
            f"{plain['activation_bytes'] / MIB:.1f} MiB; elapsed time more than that, predicted / measured",
            "",
            "| activations | " + " | ".join(OFFLOAD_WAYS.values()) + " | moved |",
            "|---|" + "---:|" * (len(OFFLOAD_WAYS) + 1),
        ]
        for budget in dict.fromkeys(line["budget"] for line in mine if line["budget"]):
            ways = {way: found[budget, way] for way in OFFLOAD_WAYS}
            shares = [f"{100 * line['fraction']:.1f} %" for line in ways.values() if "fraction" in line]
            cells = [offload_cell(line) for line in ways.values()]
            moved = f"{ways['disk'].get('moved_bytes', 0) / MIB:.1f} MiB"
            name = budget.replace("%", " %") if "%" in budget else f"{budget}: {', '.join(shares) or '-'}"
            rows.append(f"| {name} | {' | '.join([*cells, moved])} |")
        rows.append("")
    first = lines[0]
    store, fetch, _ = first["links"]["disk"]
    rows.append(
        f"Medians of {first['rounds']} interleaved rounds, of the ratio to the plain step; ± half the quartile range. "
        f"Disk ({first['file_system']}) measured at {store / 1e9:.2f} GB/s out and {fetch / 1e9:.2f} GB/s back. "
        f"Gradients bitwise equal in all of them. {first['device']}, {first['threads']} thread, torch "
        f"{first['torch']}, commit {first['commit']}."
    )
    if any(not line.get("bitwise_equal", True) for line in lines):
        raise SystemExit("gradients differ where they must not: no table is made of that.")
    return "\n".join(rows)


def offload_cell(line: dict) -> str:
    if line["status"] != "ok":
        return line["status"]
    measured = overhead(line["elapsed_ratio"] - 1, line["elapsed_ratio_quartiles"])
    return f"{100 * line['predicted_overhead']:+.1f} / {measured}"


FULLS_PEAK = "at full's peak"
PLANNER_COLUMNS = (
    "case",
    "ops",
    "MiB",
    "50 %",
    "36 %",
    "25 %",
    "at full's",
    "least",
    "gap",
    "solve",
    "peak off",
    "grads",
)


def planner_table(lines: list[dict]) -> str:
    """One row per case: overheads by budget, then the worst of gap, solve time and peak error."""
    rows = ["| " + " | ".join(PLANNER_COLUMNS) + " |", "|---|" + "---:|" * (len(PLANNER_COLUMNS) - 2) + "---|"]
    for case in dict.fromkeys(line["case"] for line in lines):
        rows.append("| " + " | ".join(planner_cells(case, [x for x in lines if x["case"] == case])) + " |")
    first = lines[0]
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    devices = " and ".join(dict.fromkeys(line["device"] for line in lines))
    note = f"{devices}, torch {first['torch']}, transformers {first['transformers']}, commit {commits}."
    return "\n".join([*rows, "", note])


def planner_cells(case: str, lines: list[dict]) -> list[str]:
    by = {line["budget"]: line for line in lines}
    ran = [line for line in lines if "peak_error" in line]
    if not ran:
        return [case, *[""] * 9, lines[0]["status"], ""]

    def extra(budget: str) -> str:
        line = by.get(budget, {})
        return f"{100 * line['predicted_overhead']:+.1f}" if "predicted_overhead" in line else "-"

    full = f"{extra(FULLS_PEAK)} / {extra('full checkpointing')}" if "full checkpointing" in by else ""
    plain, least = by.get("none", ran[0]), by.get("least", {})
    # At the least peak schedules of many replays take over, far from any bound.
    gaps = [line["gap"] for line in ran if line["gap"] is not None and line["budget"] != "least"]
    equal = all(line["bitwise_equal"] for line in ran)
    return [
        case,
        str(plain["ops"]),
        f"{(plain['plain_peak_bytes'] - plain['resident_bytes']) / MIB:.0f}",
        *(extra(budget) for budget in ("50%", "36%", "25%")),
        full,
        f"{100 * least['fraction']:.1f}" if "fraction" in least else "-",
        f"{100 * max(gaps):.2f}" if gaps else "-",
        f"{max(line.get('solve_cpu_s', line['total_solve_s']) for line in ran):.1f} s",
        f"{100 * max(line['peak_error'] for line in ran):.4f}",
        "equal" if equal else "**differ**",
    ]


def times_table(lines: list[dict]) -> str:
    """One row per case: predicted / measured overhead by budget, with the spread."""
    budgets = ("50%", "36%", "25%", FULLS_PEAK, "full checkpointing")
    columns = ("case", "plain", *(b.replace("%", " %") for b in budgets), "spread", "control")
    rows = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    timed = [line for line in lines if "overhead" in line]
    for case in dict.fromkeys(line["case"] for line in timed):
        by = {line["budget"]: line for line in timed if line["case"] == case}
        control = by.pop("none")
        spread = statistics.median(half_range(line["overhead_quartiles"]) for line in by.values())
        cells = [times_cell(by[b]) if b in by else "-" for b in budgets]
        cells += [f"{spread:.1f}", f"{100 * control['overhead']:+.1f}"]
        rows.append(f"| {case} | {control['plain_ms']:.0f} ms | {' | '.join(cells)} |")
    off = sorted(abs(line["points_off"]) for line in timed if line["budget"] != "none")
    near = sum(points <= 3 for points in off)
    first = timed[0]
    commits = ", ".join(dict.fromkeys(line["commit"] for line in timed))
    note = (
        f"{near} of {len(off)} plans are within 3 points of what they predict; median {statistics.median(off):.1f}, "
        f"worst {off[-1]:.1f}. Medians of {first['rounds']} rounds. {first['device']}, {first['threads']} thread, "
        f"torch {first['torch']}, commit {commits}."
    )
    return "\n".join([*rows, "", note])


def times_cell(line: dict) -> str:
    return f"{100 * line['predicted_overhead']:+.1f} / {100 * line['overhead']:+.1f}"


def half_range(quartiles: list[float]) -> float:
    """Half the distance between the quartiles, in points."""
    return 100 * (quartiles[1] - quartiles[0]) / 2


ABLATION_COLUMNS = ("switched off", "pairs", "plan, worst", "mean", "least", "gap", "CPU", "at worst", "verdict")
PLAN_POINTS, GAP_POINTS = 0.1, 0.5  # what a part has to be worth to stay
TIME_SHARE = 0.1  # of the processor time of the pairs where it has a say


def ablation_table(lines: list[dict]) -> str:
    """One row per part: what plans, bounds and processor time lose without it."""
    plain = {(line["case"], line["budget"]): line for line in lines if line["part"] == "none"}
    rows = ["| " + " | ".join(ABLATION_COLUMNS) + " |", "|---|" + "---:|" * (len(ABLATION_COLUMNS) - 2) + "---|"]
    for part in dict.fromkeys(line["part"] for line in lines if line["part"] != "none"):
        mine = [line for line in lines if line["part"] == part]
        rows.append(f"| {part} | {' | '.join(ablation_cells(mine, plain))} |")
    first = lines[0]
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    note = f"{first['device']}, {first['threads']} thread, torch {first['torch']}, commit {commits}."
    return "\n".join([*rows, "", note])


def ablation_cells(lines: list[dict], plain: dict[tuple[str, str], dict]) -> list[str]:
    """Of one part: ``lines`` without it, ``plain`` with all of them."""
    both = [(plain[line["case"], line["budget"]], line) for line in lines]
    ran = [(a, b) for a, b in both if b["ran"]]
    plans = [(points(a, b, "predicted_overhead"), b) for a, b in both if "predicted_overhead" in a]
    least = [(points(a, b, "fraction"), b) for a, b in both if a["status"] == "infeasible"]
    gaps = [(points(a, b, "gap"), b) for a, b in both if a.get("gap") is not None and b.get("gap") is not None]
    seconds = [more_seconds(a, b) for a, b in both]
    lost = max((p for p, _ in plans), default=0.0)
    looser, higher = (max((p for p, _ in some), default=0.0) for some in (gaps, least))
    more_s, of_s = sum(seconds), sum(a["cpus"][-1] for a, _ in ran)
    linked = "disk" in lines[0]["budget"]
    unseen = {pair for pair in plain if ("disk" in pair[1]) == linked and pair[1] != "least"}
    unseen -= {(line["case"], line["budget"]) for line in lines}
    if lines[0]["part"] not in ablation.PARTS:
        verdict = "removed"
    elif max(lost, higher) >= PLAN_POINTS:
        verdict = "kept: plans"
    elif looser > GAP_POINTS:
        verdict = "kept: gaps"
    elif unseen:
        verdict = "no loss yet"
    elif ran and more_s > TIME_SHARE * of_s:
        verdict = "kept: time"
    else:
        verdict = "not needed" if ran else "no effect"
    finite = [p for p, _ in plans if math.isfinite(p)]
    return [
        f"{len(ran)} of {len(both)}",
        worst_cell(plans),
        f"{statistics.mean(finite):+.2f}" if finite else "-",
        worst_cell(least),
        worst_cell(gaps),
        f"{more_s:+.1f} s of {of_s:.0f}" if ran else f"{more_s:+.1f} s",
        f"{max(seconds):+.1f} s",
        verdict,
    ]


def more_seconds(a: dict, b: dict) -> float:
    """Processor time that ``b`` took beyond ``a``; where it was not searched again, less the time in its part."""
    if b["ran"]:
        return b["cpu_s"] - a["cpus"][-1]
    return 0.0 - ((a["reached"].get(b["part"]) or {}).get("cpu_s") or 0.0)


def points(a: dict, b: dict, field: str) -> float:
    """How much more ``b`` has, in points; infinite where it has nothing."""
    return 100 * (b[field] - a[field]) if field in b else math.inf


def worst_cell(losses: list[tuple[float, dict]]) -> str:
    """The largest loss, and where it is one, on what."""
    if not losses:
        return "-"
    worst, line = max(losses, key=lambda loss: loss[0])
    if math.isinf(worst):
        return f"{'no plan' if line['status'] == 'infeasible' else line['status']} ({line['case']}, {line['budget']})"
    return f"{worst:+.2f}" + (f" ({line['case']}, {line['budget']})" if worst >= 0.005 else "")


if __name__ == "__main__":
    sys.exit(main())
