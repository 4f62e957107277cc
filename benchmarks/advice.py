"""What ``lowtide advise`` answers to five questions that people ask: one JSON line for each.

    cd benchmarks
    python advice.py                 all five, three minutes of one core; writes the results
    python advice.py --only NAME     one again

The page docs/how-to/will-it-fit.md shows them. ``text`` is what the command prints; ``cpu_s`` is of the whole process,
imports included.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys

from provenance import HERE, provenance

RESULTS = HERE / "results" / "advice.jsonl"
QUESTIONS = {
    "7b": "--model llama-2-7b --device rtx4090 --seq-len 2048 --global-batch 16 --precision bf16",
    "v100": "--model llama-2-7b --device v100-32gb --gpus 8 --seq-len 2048 --global-batch 16",
    "70b": "--model llama-3.1-70b --device h100 --gpus 8 --seq-len 4096 --global-batch 16 --precision bf16",
    "13b": "--model llama-2-13b --device a100-40gb --seq-len 2048 --global-batch 8 --precision bf16",
    "long": "--model llama-3.1-8b --device h100 --seq-len 16384 --global-batch 1 --precision bf16",
}


def answer(name: str) -> dict:
    """The line of one question, answered in a process of its own."""
    command = f"lowtide advise {QUESTIONS[name]}"
    before = _children_cpu_s()
    child = subprocess.run(
        [sys.executable, "-m", "lowtide.cli", *shlex.split(command)[1:]], capture_output=True, text=True, check=False
    )
    if child.returncode not in (0, 1):
        raise SystemExit(f"{command} failed:\n{child.stderr}")
    return {
        "benchmark": "advice",
        "name": name,
        "command": command,
        "text": child.stdout.rstrip("\n"),
        "cpu_s": round(_children_cpu_s() - before, 1),
    }


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=QUESTIONS)
    args = parser.parse_args()
    shared = provenance()
    for name in [args.only] if args.only else QUESTIONS:
        line = {**answer(name), **shared}
        print(name, line["cpu_s"], "s", flush=True)
        write(line)
    return 0


def write(line: dict) -> None:
    """Put a line into the results, in the place of the former one."""
    known = map(json.loads, RESULTS.read_text().splitlines()) if RESULTS.exists() else ()
    lines = {x["name"]: x for x in known} | {line["name"]: line}
    RESULTS.write_text("".join(json.dumps(lines[name]) + "\n" for name in QUESTIONS if name in lines))


if __name__ == "__main__":
    sys.exit(main())
