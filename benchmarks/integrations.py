"""Real trainings in the libraries people train with, with lowtide and without: one JSON line a case.

    python benchmarks/integrations.py                          all cases; about a quarter of an hour
    python benchmarks/integrations.py --cases SFT "plain loop"  some of them: the other lines of the file stay
    python benchmarks/integrations.py --quick                  of the timed cases a few steps; nothing is written

Each case is a process of its own (two ranks: two), on one thread, with an empty cache of plans. Small ones
(``integration_cases.py``) compare losses and weights to the last bit, and each step's allocator peak with the budget.
The timed ones (``timed_trainers.py``) are large enough for what lowtide costs to mean something.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from integration_cases import CASES, FRACTION, Case, Ran
from provenance import provenance

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "integrations_cpu.jsonl"
TIMED = {"padded SFT": "TRL", "GRPO with generation": "TRL"}
NAMES = [case.name for case in CASES] + list(TIMED)
LIMIT_S = 2400  # of one case


class Told(logging.Handler):
    """The first line that lowtide logs, in whichever library's log."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if not self.first and "lowtide: " in message:
            self.first = message.partition("lowtide: ")[2]


def main() -> int:
    args = _arguments()
    if args.here:
        torch.set_num_threads(1)
        found = _timed_line(args.cases[0], quick=args.quick) if args.cases[0] in TIMED else _line(_case(args.cases[0]))
        print("\n" + json.dumps(found), flush=True)
        return 0
    failed = 0
    for name in args.cases or NAMES:
        found = _in_processes(name, quick=args.quick)
        failed += found["status"] != "ok"
        if args.quick:
            print(json.dumps(found))
        else:
            _write(found)
        shown = {key: found.get(key) for key in ("bitwise_losses", "bitwise_weights", "largest_peak_share", "steps")}
        print(name, found["status"], shown, found.get("planned_steps"), file=sys.stderr, flush=True)
        if found["status"] != "ok":
            print("\n".join(found["error"]), file=sys.stderr, flush=True)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=NAMES, metavar="CASE", help="some of them")
    parser.add_argument("--quick", action="store_true", help="to see that it runs")
    parser.add_argument("--here", action="store_true", help="one case, in this process, its line to stdout")
    return parser.parse_args()


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def _write(found: dict) -> None:
    """Replace the case's line in the results."""
    old = [json.loads(text) for text in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    kept = [line for line in old if line["case"] in NAMES and line["case"] != found["case"]]
    every = sorted([*kept, found], key=lambda line: NAMES.index(line["case"]))
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in every))


def _in_processes(name: str, *, quick: bool) -> dict:
    """The case's line: of rank 0, or of the first rank that fails or has other bits."""
    ranks = 0 if name in TIMED else _case(name).ranks
    command = [sys.executable, __file__, "--here", "--cases", name, *(["--quick"] if quick else [])]
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        shared = {
            **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LOWTIDE_CACHE_DIR": folder,
            "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "TORCH_EXTENSIONS_DIR": folder,
        }  # fmt: skip
        if ranks:
            port = str(free.getsockname()[1])
            shared |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        free.close()
        processes = [
            subprocess.Popen(
                command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={**shared, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {})},
            )
            for rank in range(ranks or 1)
        ]  # fmt: skip
        found = [_line_of(process, name) for process in processes]
    wrong = [
        line for line in found if line["status"] != "ok" or not (line["bitwise_losses"] and line["bitwise_weights"])
    ]
    return (wrong or found)[0]


def _line_of(process: subprocess.Popen, name: str) -> dict:
    try:
        out, errors = process.communicate(timeout=LIMIT_S)
        status = f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        status = f"no end after {LIMIT_S} s"
    if process.returncode == 0:
        return json.loads(out.splitlines()[-1])
    library = TIMED[name] if name in TIMED else _case(name).library
    failed = {"benchmark": "integrations_cpu", "case": name, "library": library, "version": "", "status": status}
    return failed | {"error": errors.splitlines()[-20:]}


def _line(case: Case) -> dict[str, Any]:
    """Plain, once more within the budget."""
    if case.ranks:
        torch.distributed.init_process_group("gloo")
    told = Told()
    for name in ("lowtide", "transformers.trainer", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).addHandler(told)
    plain, plain_s = _timed(case, None)
    budget = plain.budget
    if budget is None:  # as lowtide counts a percentage; then in bytes, which hold from the first step on
        first, _ = _timed(case, f"{100 * FRACTION:.0f}%")
        assert first.status is not None
        budget = first.status.budget_bytes
        told.first = ""
    ours, ours_s = _timed(case, budget)
    if case.ranks:
        torch.distributed.destroy_process_group()
    status = ours.status
    assert status is not None and budget is not None
    return {
        **_head(case.name, case.library, case.package),
        "bitwise_losses": bool(plain.losses) and ours.losses == plain.losses,
        "bitwise_weights": ours.weights == plain.weights,
        "fraction": FRACTION, "budget_bytes": budget, "plain_peak_bytes": max(plain.peaks),
        "largest_peak_share": max(ours.peaks) / budget,
        "largest_planned_peak_share": max(ours.planned_peaks) / budget if ours.planned_peaks else None,
        "steps": status.steps, "planned_steps": status.planned_steps, "plans": status.plans, "waited": True,
        "plain_s": plain_s, "with_s": ours_s, "printed_first": told.first, "reasons": list(status.reasons),
        **provenance(),
    }  # fmt: skip


def _timed(case: Case, budget: Any) -> tuple[Ran, float]:
    """CPU seconds of the training thread: measured under the memory profiler, which slows every step."""
    start = time.thread_time()
    ran = case.run(budget)
    return ran, time.thread_time() - start


def _timed_line(name: str, *, quick: bool) -> dict[str, Any]:
    timed_trainers = importlib.import_module("timed_trainers")  # TRL takes seconds to import
    told = Told()
    for logger in ("lowtide", "transformers.trainer"):
        logging.getLogger(logger).addHandler(told)
    found = timed_trainers.line(name, quick=quick)
    return {**_head(name, TIMED[name], "trl"), **found, "printed_first": told.first, **provenance()}


def _head(name: str, library: str, package: str) -> dict[str, Any]:
    return {
        "benchmark": "integrations_cpu", "case": name, "library": library,
        "version": version(package) if package else None, "status": "ok",
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
