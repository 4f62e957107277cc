"""Llama 8B, compiled by layer and sharded over 8 H100s that are not there: PyTorch's options beside lowtide's plans.

    python benchmarks/compiled_full_size.py [--again]

Each row is one run of ``scripts/compiled_training.py`` by ``lowtide.pretend``: PyTorch's own allocator counts, Inductor
compiles its Triton kernels, and the time of a step is that of a table of devices. lowtide gets the peaks of PyTorch's
options as budgets. Written to ``results/compiled_full_size.jsonl`` after each row; rows that are there are left. Run by
the Python of ``.venv-cuda``; some ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from full_size import DEVICE, PLENTY_BYTES
from provenance import provenance
from scripts.compiled_training import METHODS

import lowtide
from lowtide.estimation.device_table import device_named
from lowtide.pretending.settings import NCCL_BYTES

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "compiled_full_size.jsonl"
SCRIPT = HERE / "scripts" / "compiled_training.py"
AT_PEAK_OF = ("selective", "memory budget 0.7", "memory budget 0.5", "memory budget 0.3", "full checkpointing")
STEPS = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="rows that are there too")
    given = parser.parse_args()
    rows = (
        [] if given.again or not RESULTS.exists() else [json.loads(line) for line in RESULTS.read_text().splitlines()]
    )
    known = {row["method"]: row for row in rows}
    with tempfile.TemporaryDirectory() as empty:
        os.environ["LOWTIDE_CACHE_DIR"] = empty
        for method in METHODS[:-1]:
            keep(known, method, lambda method=method: measured(method))
        for of in AT_PEAK_OF:
            budget = known[of]["peak_bytes"]
            if budget is not None:
                keep(known, f"lowtide, peak of {of}", lambda budget=budget: measured("lowtide", budget))
    return 0


def keep(known: dict[str, dict[str, Any]], name: str, run: Any) -> None:
    if name in known:
        return
    known[name] = {"method": name, **run(), **provenance()}
    print(json.dumps(known[name]), flush=True)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in known.values()))


def measured(method: str, budget: int | None = None) -> dict[str, Any]:
    context_bytes = device_named(DEVICE).context_bytes + NCCL_BYTES
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        options = [] if budget is None else ["--budget", str(budget), "--plan", str(plan)]
        report = lowtide.pretend(
            ["torchrun", "--nproc-per-node", "8", str(SCRIPT), method, *options], DEVICE, ranks=8,
            memory=PLENTY_BYTES + context_bytes, steps=STEPS, history=False, output=sys.stderr,
        )  # fmt: skip
        facts = json.loads(plan.read_text()) if plan.exists() else {}
    if report.exit_code:
        return {"error": report.last_words.strip().splitlines()[-1], "peak_bytes": None, "budget_bytes": budget}
    last, time = report.steps[-1], report.time
    return {
        "budget_bytes": budget,
        "peak_bytes": last.allocated_bytes,
        "first_peaks_bytes": [step.allocated_bytes for step in report.steps[:2]],
        "launches": last.launches,
        "step_ms": None if time is None else time.step_ms,
        "error_fraction": None if time is None else time.error_fraction,
        **facts,
    }


if __name__ == "__main__":
    sys.exit(main())
