"""Published training rates beside what ``lowtide pretend`` says of the same training, without a GPU.

    cd benchmarks
    python pretend_time.py                 rows that have no record yet, then what all records say
    python pretend_time.py --again MPT     rows whose key holds the word, once more

Each row's script runs under ``lowtide pretend`` (PyTorch's CUDA build); the step that it records is kept beside
lowtide's cache, so that another table of devices needs no further run. Rows of a family are told twice: as the table
says, and with the speed of matrix products that one published row of the family gives (the anchor).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretend_time_rows import TimeRow, rows
from provenance import HERE, provenance

from lowtide.cache_files import cache_dir
from lowtide.pretending import command_run, environments
from lowtide.pretending.settings import Measured, PretendSettings
from lowtide.pretending.step_record import StepRecord, step_record
from lowtide.pretending.step_time import StepTime, step_time

RESULTS = HERE / "results" / "pretend_time.json"
RECORDS = cache_dir() / "pretend-time"
_MEMORY_BYTES = 1 << 40  # what fits is another question


def path_of(row: TimeRow) -> Path:
    return RECORDS / ("".join(c if c.isalnum() else "-" for c in row.key) + ".json")


def run(row: TimeRow) -> dict[str, Any]:
    """What the stand-in recorded of one step."""
    start = f"torchrun --nproc-per-node {min(8, row.ranks)}" if row.ranks > 1 else "python"
    command = [*start.split(), "published_training.py", *row.options.split()]
    settings = PretendSettings(
        device=row.device, ranks=row.ranks if row.ranks > 1 else None, memory_bytes=_MEMORY_BYTES, history=False
    )
    with open(os.devnull, "w") as nowhere:
        done = command_run.run(command, settings, environments.find(), nowhere)
    if done.step_record is None:
        raise SystemExit(f"{row.key}: no step was recorded; exit code {done.exit_code}\n{done.last_words[-2000:]}")
    return {"record": done.step_record, "facts": done.seen["step_record"], "seconds": round(done.seconds, 1)}


def told(row: TimeRow, record: StepRecord, anchor: Measured | None = None) -> StepTime:
    network = None if row.network_gbit is None else row.network_gbit * 1e9
    device = PretendSettings(device=row.device).facts
    return step_time(record, device, tokens=row.per_step, anchor=anchor, network_bits_per_s=network)


def lines() -> Iterator[dict[str, Any]]:
    """A line of the results for each row that has a record."""
    found = {row.key: json.loads(path_of(row).read_text()) for row in rows() if path_of(row).exists()}
    records = {key: step_record(body["record"], body["facts"]) for key, body in found.items()}
    speeds = {
        row.family: told(row, records[row.key], Measured(row.published, "tokens/s")).speed
        for row in rows() if row.is_anchor and row.key in records
    }  # fmt: skip
    for row in rows():
        if row.key not in records:
            continue
        time = told(row, records[row.key])
        line = {
            "benchmark": "pretend_time", "row": row.key, "published": row.published,
            "predicted": row.per_step / time.step_ms * 1e3, "step_ms": time.step_ms, "busy_ms": time.busy_ms,
            "host_ms": time.host_ms, "communication_ms": time.communication_ms,
            "exposed_communication_ms": time.exposed_communication_ms, "launch_bound": time.launch_bound,
            "mfu": time.mfu, "hfu": time.hfu, "entries": len(records[row.key].entries),
            "seconds": found[row.key]["seconds"],
        }  # fmt: skip
        speed = speeds.get("h100" if row.family == "h100 500 W" else row.family)
        if speed is not None:
            anchored = told(row, records[row.key], Measured(speed, "speed"))
            line |= {"speed": speed, "anchored": row.per_step / anchored.step_ms * 1e3}
        yield line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", help="a word of the key; '' is all")
    parser.add_argument("--tell", action="store_true", help="run nothing")
    args = parser.parse_args()
    RECORDS.mkdir(parents=True, exist_ok=True)
    for row in rows():
        wanted = not path_of(row).exists() if args.again is None else args.again in row.key
        if wanted and not args.tell:
            path_of(row).write_text(json.dumps(run(row)))
            print(f"recorded {row.key}", flush=True)
    shared = provenance()
    told_lines = [{**line, **shared} for line in lines()]
    for line in told_lines:
        ratio, anchored = (line.get(name, 0.0) / line["published"] for name in ("predicted", "anchored"))
        print(f"{line['published']:>10,.1f} {line['predicted']:>10,.1f} {ratio:>6.3f} {anchored:>6.3f}  {line['row']}")
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, told_lines)) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
