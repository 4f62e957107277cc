"""What benchmarks of ways to run one step share: a process whose memory stays in it, and the lines of interleaved runs.

Memory stays in the process (``MALLOC_MMAP_MAX_=0``, no trimming), so that page faults do not flatter lean steps. All
methods run interleaved on the same weights. Time is process CPU time, as a ratio to the plain step just before and just
after; peaks are the allocator's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from paired_times import paired_times
from provenance import provenance

SEED = 0
MALLOC_FIXED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def main(
    script: str, doc: str, results: Path, lines: Callable[[argparse.Namespace], list[dict]], **environment: str
) -> int:
    """Run ``lines`` of ``script`` in a process of its own and write them to ``results``, or where ``--out`` says."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of every method (default 7)")
    parser.add_argument("--out", type=Path, default=results)
    parser.add_argument("--quick", action="store_true", help="a toy model, one round")
    parser.add_argument("--here", action="store_true", help="in this process, lines to stdout")
    args = parser.parse_args()
    if args.here:
        for line in lines(args):
            print(json.dumps(line), flush=True)
        return 0
    found = subprocess.run(
        [sys.executable, script, *sys.argv[1:], "--here"],
        env={**os.environ, **MALLOC_FIXED, **ONE_THREAD, **environment},
        stdout=subprocess.PIPE,
        check=False,
    )
    if found.returncode == 0:
        args.out.write_bytes(found.stdout)
        print(f"wrote {args.out}", file=sys.stderr)
    return found.returncode


def outcome(model: Any, step: Callable[[], float]) -> tuple[int, list]:
    """Peak bytes of ``step``, which returns its loss; and that loss and the gradients."""
    import torch

    from lowtide.measurement.allocator import peak_bytes

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    losses: list[float] = []
    peak = peak_bytes(lambda: losses.append(step()))
    return peak, [torch.tensor(losses), *(p.grad.clone() for p in model.parameters())]


def interleaved(
    args: argparse.Namespace, model: Any, names: Iterable[str], step: Callable[[str], float], **fields: Any
) -> list[dict]:
    """One line for each of ``names``, ``none`` among them: peak, bits and times beside the plain step."""
    from lowtide.measurement.timing import time_ms
    from lowtide.step.bits import same_bits

    names, rounds = list(names), 1 if args.quick else args.rounds
    plain_peak, reference = outcome(model, partial(step, "none"))
    first_ms = {name: time_ms(partial(step, name)) for name in names}
    plain, times, ratios = paired_times(
        partial(time_ms, partial(step, "none")),
        {name: partial(time_ms, partial(step, name)) for name in names if name != "none"},
        rounds=rounds,
        on_round=lambda done, total: print(f"round {done} of {total}", file=sys.stderr),
        seed=SEED,
    )
    found = []
    for name in names:
        peak, results = outcome(model, partial(step, name))
        ratio = ratios.get(name)
        found.append({
            **fields,
            "method": name,
            "activation_bytes": peak,
            "fraction": peak / plain_peak,
            "bitwise_equal": all(same_bits(a, b) for a, b in zip(results, reference, strict=True)),
            "first_step_ratio": first_ms[name] / plain.median_ms,
            "time_ms": (times[name] if ratio else plain).median_ms,
            "time_ratio": ratio.median_ms if ratio else 1.0,
            "time_ratio_quartiles": ratio.quartiles if ratio else [1.0, 1.0],
            "seed": SEED,
            "rounds": rounds,
            **provenance(),
        })  # fmt: skip
    return found
