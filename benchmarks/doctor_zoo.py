"""The doctor on set-ups that nobody made sick: what it says of a slice of the zoo, plain and checkpointed.

    cd benchmarks
    python doctor_zoo.py               some minutes of one core; writes results/doctor_zoo_cpu.jsonl
    python doctor_zoo.py --only llama  some architectures, printed and not written

A finding here is a false alarm, or a flaw of the model itself: the page names each one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from zoo import architectures
from zoo.batches import loss_of

import lowtide
from lowtide.errors import StepError

RESULTS = Path(__file__).parent / "results" / "doctor_zoo_cpu.jsonl"
EVERY = 10  # of the zoo's architectures, in its order


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="model types")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    everything = list(architectures.names())
    wanted = [s for s in everything if s[1] in args.only] if args.only else everything[::EVERY]
    shared, lines = provenance(), []
    for task, kind in wanted:
        for checkpointed in (False, True):
            if (line := look(task, kind, checkpointed)) is None:
                continue
            print(json.dumps(line), file=sys.stdout if args.only else sys.stderr, flush=True)
            lines.append({"benchmark": "doctor_zoo_cpu", **line, **shared})
    if not args.only:
        RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


def look(task: str, kind: str, checkpointed: bool) -> dict[str, Any] | None:
    """What the doctor says of one architecture; None where it cannot be built or checkpointed."""
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            small = architectures.build(task, kind)
    except architectures.CannotBuild:
        return None
    model = small.model
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False  # LT205 says so
    if checkpointed:
        try:
            model.activation_checkpointing_enable()
        except ValueError:
            return None  # the class says that it does not support it
    torch.manual_seed(0)
    gc.collect()
    start = time.process_time()
    try:
        found = lowtide.diagnose(model, small.batch, lambda model, batch: loss_of(model(**batch)))
    except StepError:
        return None  # it fails without checkpointing too
    return {
        "task": task, "type": kind, "checkpointed": checkpointed,
        "findings": {f.code: f"{f.severity}: {f.evidence}" for f in found}, "notes": list(found.notes),
        "cpu_s": round(time.process_time() - start, 1),
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
