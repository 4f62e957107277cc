"""Trainings that ran on a GPU, beside what ``lowtide pretend`` says of them where there is none.

    cd benchmarks
    python foreseen_gpu.py [CASE ...]            cases of scripts/gpu_training.py that have no record yet, pretended
    python foreseen_gpu.py --measured gpu.jsonl  what the script printed on the GPU, joined with what the records say

The recorded step is kept beside lowtide's cache, so that another table of devices needs no further run. What was
foreseen when a measured case was first joined is kept as ``first``, whatever the tables become: they may have been
calibrated on that case since.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

from provenance import HERE, commit
from scripts.gpu_training import CASES

from lowtide.cache_files import cache_dir
from lowtide.pretending import command_run, environments
from lowtide.pretending.outcome import outcome
from lowtide.pretending.settings import PretendSettings
from lowtide.pretending.step_record import step_record
from lowtide.pretending.step_time import step_time

RESULTS = HERE / "results" / "foreseen_gpu.json"
RECORDS = cache_dir() / "foreseen-gpu"
SCRIPT = HERE / "scripts" / "gpu_training.py"
DEVICES = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100"}  # what PyTorch calls them: the table's names
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")


def path_of(case: str) -> Path:
    return RECORDS / ("".join(c if c.isalnum() else "-" for c in case) + ".json")


def run(case: str) -> dict[str, Any]:
    """Peaks and what the stand-in recorded of one step; they depend on no device's speed."""
    settings = PretendSettings(device="h200", history=False)
    environment = environments.find()
    with open(os.devnull, "w") as output:
        done = command_run.run(["python", str(SCRIPT), case], settings, environment, output)
    if done.step_record is None:
        raise SystemExit(f"{case}: no step was recorded; exit code {done.exit_code}\n{done.last_words[-2000:]}")
    report = outcome(done, settings, environment, settings.facts.usable_bytes)
    return {name: getattr(report, name) for name in PEAKS} | {
        "record": done.step_record, "facts": done.seen["step_record"], "torch": environment.torch,
    }  # fmt: skip


def keep(case: str, body: dict[str, Any]) -> None:
    """The run whose host was fastest: other work on this machine makes it slower, and nothing makes it faster."""
    path = path_of(case)
    before = json.loads(path.read_text()) if path.exists() else body
    fewest, most = sorted((body, before), key=lambda b: min(b["facts"]["host_ns"]))
    print(f"{case}: host {min(fewest['facts']['host_ns']) / 1e6:.1f} ms, {min(most['facts']['host_ns']) / 1e6:.1f} ms",
          flush=True)  # fmt: skip
    path.write_text(json.dumps(fewest))


def foreseen(body: dict[str, Any], device: str) -> dict[str, Any]:
    """What the present tables say of a record."""
    time = step_time(step_record(body["record"], body["facts"]), PretendSettings(device=device).facts)
    found = {name: getattr(time, name) for name in ("step_ms", "busy_ms", "host_ms", "launch_bound")}
    return {name: body[name] for name in PEAKS} | found | {"torch": body["torch"], "commit": commit()}


def joined(measured: list[dict[str, Any]], before: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each measured case that has a record; ``before`` are the lines that were there."""
    lines = []
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for case in measured:
        if not path_of(case["case"]).exists():
            continue
        device = DEVICES[case["device"]]
        now = foreseen(json.loads(path_of(case["case"]).read_text()), device)
        old = before.get(case["case"], {})
        lines.append({
            "benchmark": "foreseen_gpu", "case": case["case"], "device": device, "measured": case, "foreseen": now,
            "first": old["first"] if old.get("measured") == case else now, "date": today,
        })  # fmt: skip
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, help="lines of scripts/gpu_training.py on a GPU")
    parser.add_argument("cases", nargs="*", help="pretended now, whether there is a record or not")
    args = parser.parse_args()
    if args.measured is None:
        RECORDS.mkdir(parents=True, exist_ok=True)
        for case in args.cases or [case for case in CASES if not path_of(case).exists()]:
            keep(case, run(case))
        return 0
    measured = [json.loads(line) for line in args.measured.read_text().splitlines()]
    before = {line["case"]: line for line in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    lines = joined(measured, before)
    for line in lines:
        took, *foreseen_ms = (line[name]["step_ms"] for name in ("measured", "first", "foreseen"))
        said = " ".join(f"{ms:8.1f} {ms / took - 1:+7.1%}" for ms in foreseen_ms)
        off = line["foreseen"]["peak_allocated_bytes"] - line["measured"]["peak_allocated_bytes"]
        print(f"{line['case']:25} {took:8.1f} ms, foreseen at first and now {said}  allocated {off:+,}")
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
