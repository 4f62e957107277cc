"""Write the benchmark's table into README from the committed results; ``--check`` fails where they differ.

python benchmarks/table.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "decoder_cpu.jsonl"
README = ROOT / "README.md"
BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"
MIB = 2**20
COLUMNS = (
    "method", "activations", "of plain", "predicted", "time", "time, malloc fixed", "predicted", "gap", "solve",
    "gradients",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where README differs")
    args = parser.parse_args()
    before = README.read_text()
    after = replaced(before, tables(read(RESULTS)))
    if args.check:
        if before != after:
            print("README's table is not that of the results. Run: python benchmarks/table.py", file=sys.stderr)
        return int(before != after)
    README.write_text(after)
    return 0


def read(path: Path) -> list[dict]:
    """One dict per case, malloc mode and method."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def replaced(readme: str, table: str) -> str:
    """``readme`` with what lies between the markers replaced."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md has no {BEGIN} ... {END} to write between.")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def tables(lines: list[dict]) -> str:
    """One table per case, its methods in the order run, both malloc modes side by side."""
    cases = list(dict.fromkeys(line["case"] for line in lines))
    return "\n\n".join([*(case_table([x for x in lines if x["case"] == case]) for case in cases), footnote(lines)])


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
    # Predictions of time belong to a process: those beside the fixed column were made in it.
    beside = fixed if fixed is not None and fixed["status"] != "infeasible" else None
    return [
        f"{line['activation_bytes'] / MIB:.1f} MiB",
        f"{line['fraction']:.3f}",
        f"{predicted} MiB" if ours else "",
        overhead(line["time_ratio"] - 1, line["time_ratio_quartiles"]),
        overhead(beside["time_ratio"] - 1, beside["time_ratio_quartiles"]) if beside else "",
        f"{100 * beside['predicted_overhead']:+.1f} %" if ours and beside else "",
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
        "“Malloc fixed” keeps memory in the process (`MALLOC_MMAP_MAX_=0`, no trimming), so that page faults "
        "do not flatter lean plans; predictions are for that."
    )


if __name__ == "__main__":
    sys.exit(main())
