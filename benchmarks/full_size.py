"""lowtide at the sizes that people train, on an H100 that is not there: plans, planned steps, steps without a plan.

    python benchmarks/full_size.py [--only llama-8b] [--again] [--tight]

Each row is one run of ``scripts/full_size_training.py`` by ``lowtide.pretend``: PyTorch's own allocator counts, and no
kernel runs. Written to ``results/full_size.jsonl`` after each row; rows that are there are left. Run by the Python of
``.venv-cuda``; some 40 minutes. The device has plenty. ``--tight``: rows that are there run once more, on a device that
has a twentieth more than the budget.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from provenance import provenance

import lowtide
from lowtide.estimation.device_table import device_named
from lowtide.pretending.settings import NCCL_BYTES

RESULTS = Path(__file__).parent / "results" / "full_size.jsonl"
SCRIPT = Path(__file__).parent / "scripts" / "full_size_training.py"
SHARES = (0.8, 0.7, 0.6, 0.5)  # of the plain peak
DEVICE, PLENTY_BYTES = "h100", 400 << 30
TIGHT = 1.05  # of the budget
# what trains: arguments of the script, ranks
CASES = {
    "llama-1b": (("llama-1b",), 1),
    "llama-1b autocast": (("llama-1b", "--autocast"), 1),
    "llama-8b": (("llama-8b",), 1),
    "qwen-7b": (("qwen-7b",), 1),
    "mixtral-1.2b": (("mixtral-1.2b",), 1),
    "vit-large": (("vit-large",), 1),
    "vit-large autocast": (("vit-large", "--autocast"), 1),
    "llama-8b FSDP2 over 8": (("llama-8b", "--fsdp"), 8),
    "llama-70b FSDP2 over 64": (("llama-70b", "--fsdp"), 64),
}


# in the order of the table
METHODS = (
    "plain",
    "every layer checkpointed",
    *(f"lowtide, {share:.0%} of plain" for share in SHARES),
    "lowtide, checkpointing's peak",
    "lowtide, the least",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="WORD", default="", help="cases with it in their name")
    parser.add_argument("--again", action="store_true", help="rows that are there too")
    parser.add_argument("--tight", action="store_true", help="budgets once more, on devices of a twentieth more")
    given = parser.parse_args()
    if given.tight:
        return measure_tight(given.only, again=given.again)
    known = {} if given.again else {(row["case"], row["method"]): row for row in read()}
    for case, (arguments, ranks) in CASES.items():
        if given.only not in case:
            continue
        for method, options, budget in methods(case, known):
            if (case, method) in known:
                continue
            row = measured(case, method, (*arguments, *options), ranks, budget)
            known[case, method] = row
            keep(row)
            print(told(row), flush=True)
    return 0


def measure_tight(only: str, *, again: bool) -> int:
    for row in read():
        least = row["method"].endswith("the least")  # on such a device nothing fits
        if only not in row["case"] or row["budget_bytes"] is None or least or ("tight" in row and not again):
            continue
        arguments, ranks = CASES[row["case"]]
        report = pretended(arguments, ranks, row["budget_bytes"], int(TIGHT * row["budget_bytes"]))
        row["tight"] = {
            "verdict": report.verdict, "capacity_bytes": report.capacity_bytes, "context_bytes": report.context_bytes,
            "peak_reserved_bytes": report.peak_reserved_bytes, "steps": len(report.steps), "lowtide": report.lowtide,
            "error": "" if not report.exit_code else report.last_words.strip().splitlines()[-1:], **provenance(),
        }  # fmt: skip
        keep(row)
        print(f"{row['case']}, {row['method']}: {report.verdict}, {len(report.steps)} steps", flush=True)
    return 0


def methods(case: str, known: dict) -> Iterator[tuple[str, tuple[str, ...], int | None]]:
    """Name, options of the script, budget. Budgets are shares of the plain peak, and checkpointing's own peak."""
    yield "plain", (), None
    yield "every layer checkpointed", ("--checkpointing",), None
    plain, full = (known[case, name]["peak_allocated_bytes"] for name in ("plain", "every layer checkpointed"))
    for share in SHARES:
        if plain * share > full:
            yield f"lowtide, {share:.0%} of plain", (), int(plain * share)
    yield "lowtide, checkpointing's peak", (), full
    yield "lowtide, the least", (), int(full * 0.25)


def measured(case: str, method: str, arguments: tuple[str, ...], ranks: int, budget: int | None) -> dict[str, Any]:
    report = pretended(arguments, ranks, budget, PLENTY_BYTES)
    return {
        "case": case,
        "method": method,
        "budget_bytes": budget,
        "exit_code": report.exit_code,
        "verdict": report.verdict,
        "peak_allocated_bytes": report.peak_allocated_bytes,
        "peak_reserved_bytes": report.peak_reserved_bytes,
        "steps": [
            {"allocated_bytes": s.allocated_bytes, "reserved_bytes": s.reserved_bytes, "host_ms": s.host_ms,
             "launches": s.launches, "waits": s.waits} for s in report.steps
        ],
        "lowtide": report.lowtide,
        "error": "" if not report.exit_code else report.last_words.strip().splitlines()[-1:],
        **provenance(),
    }  # fmt: skip


def pretended(arguments: tuple[str, ...], ranks: int, budget: int | None, memory_bytes: int) -> lowtide.PretendReport:
    """A run on a device of which PyTorch's allocator may have ``memory_bytes``."""
    launcher = ["torchrun", "--nproc-per-node", "8"] if ranks > 1 else ["python"]
    context_bytes = device_named(DEVICE).context_bytes + (NCCL_BYTES if ranks > 1 else 0)
    return lowtide.pretend(
        [*launcher, str(SCRIPT), *arguments], DEVICE, ranks=ranks if ranks > 1 else None, budget=budget,
        memory=memory_bytes + context_bytes, steps=8 if budget else 3, host_budget="0" if budget else None,
        history=False, output=sys.stderr,
    )  # fmt: skip


def told(row: dict[str, Any]) -> str:
    gib = 2**30
    peaks = " ".join(f"{step['allocated_bytes'] / gib:.2f}" for step in row["steps"])
    inside = row["lowtide"] or {}
    overhead = inside.get("predicted_overhead")
    return (
        f"{row['case']}, {row['method']}: {row['verdict']}; steps {peaks} GiB; planned {inside.get('planned_steps')}"
        + (f", overhead {overhead:+.1%}" if overhead is not None else "")
    )


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def keep(row: dict[str, Any]) -> None:
    """In place of the row that had its name, beside those of its case."""
    rows = [known for known in read() if (known["case"], known["method"]) != (row["case"], row["method"])]
    rows = sorted([*rows, row], key=lambda line: (list(CASES).index(line["case"]), METHODS.index(line["method"])))
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in rows))


if __name__ == "__main__":
    sys.exit(main())
