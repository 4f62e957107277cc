"""Peaks traced without memory beside peaks traced on real tensors, over the zoo's architectures.

    cd benchmarks
    python hollow_zoo.py                       every architecture and variant, an hour and a half of one core
    python hollow_zoo.py --sample 60           so many architectures, drawn with a fixed seed
    python hollow_zoo.py --only llama t5       some architectures, printed and not written
    python hollow_zoo.py --counts              what the results say

One JSON line for each architecture and variant. ``equal``: the peaks are the same to the byte. ``same_ops``: so are all
ops with their signatures. ``assumed``: what was taken for values that nobody has.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from provenance import provenance
from zoo import architectures
from zoo.batches import loss_of
from zoo.examine import with_lora

import lowtide
from lowtide.graph.costs import Costs
from lowtide.simulation.simulator import simulate_actions

RESULTS = Path(__file__).parent / "results" / "hollow_zoo_cpu.jsonl"
VARIANTS = ("float32", "bfloat16 autocast", "bfloat16", "LoRA")
SEED = 7
LIMIT_S = 150  # of processor time, for all variants of an architecture


def peak_bytes(graph: lowtide.StepGraph) -> int:
    """The plain step's simulated peak."""
    return simulate_actions(graph, Costs(op_ms=(0.0,) * len(graph.ops)), {}).peak_bytes


def compare(task: str, kind: str, variant: str) -> dict:
    """One line: both peaks, or why there are none."""
    try:
        made = architectures.build(task, kind)
        model, batch = with_lora(made.model) if variant == "LoRA" else made.model, made.batch
        if variant == "bfloat16":
            model = model.bfloat16()
            batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}

        def step(model, batch):
            with torch.autocast("cpu", torch.bfloat16, enabled=variant == "bfloat16 autocast"):
                return loss_of(model(**batch))

        torch.manual_seed(0)
        start = time.process_time()
        real = lowtide.trace(model, batch, step=step)
        real_s = time.process_time() - start
    except Exception as error:
        return {"status": "not built", "reason": _first_line(error)}
    torch.manual_seed(0)
    start = time.process_time()
    try:
        hollow = lowtide.trace(model, batch, step=step, device="cpu")
    except Exception as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {_first_line(error)}"}
    peaks = peak_bytes(real), peak_bytes(hollow)
    line = {
        "status": "equal" if peaks[0] == peaks[1] else "differs",
        "real_peak_bytes": peaks[0],
        "hollow_peak_bytes": peaks[1],
        "same_ops": [_look(real, o) for o in real.ops] == [_look(hollow, o) for o in hollow.ops],
        "ops": len(real.ops),
        "real_s": round(real_s, 2),
        "hollow_s": round(time.process_time() - start, 2),
        "assumed": hollow.provenance["assumed"].splitlines(),
    }
    pairs = zip(real.ops, hollow.ops, strict=False)
    if apart := next(
        ((a, b) for a, b in pairs if (_look(real, a), a.workspace_bytes) != (_look(hollow, b), b.workspace_bytes)), None
    ):
        line["first_difference"] = [
            f"{o.name} in {g.scope(o)}, workspace {o.workspace_bytes}" for g, o in zip((real, hollow), apart)
        ]
    return line


def _look(graph: lowtide.StepGraph, op) -> tuple:
    return op.name, json.dumps(graph.signatures[op.signature]), len(op.makes)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def lines_of(task: str, kind: str, variants: Sequence[str]) -> Iterator[dict]:
    """The variants of one architecture, in a process that may die."""
    with tempfile.NamedTemporaryFile("r") as file:
        child = os.fork()
        if child == 0:
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
            with open(file.name, "w") as lines:
                for variant in variants:
                    lines.write(json.dumps({"variant": variant, **compare(task, kind, variant)}) + "\n")
                    lines.flush()
            os._exit(0)
        _, code = os.waitpid(child, 0)
        found = [json.loads(line) for line in file]
    yield from found
    if code:
        yield {"variant": variants[len(found)], "status": "died", "reason": f"signal {code}"}


def counts(lines: list[dict]) -> str:
    """Lines by variant and status, and what is not equal."""
    table = Counter((line["variant"], line["status"]) for line in lines)
    rows = [
        f"{variant}: " + ", ".join(f"{n} {s}" for (v, s), n in sorted(table.items()) if v == variant)
        for variant in VARIANTS
    ]
    rows += [
        f"  {line['type']} {line['variant']}: {line['status']} {line.get('reason', '')} "
        f"{line.get('real_peak_bytes', '')} {line.get('hollow_peak_bytes', '')} {line.get('first_difference', '')} "
        f"{line.get('assumed', '')}"
        for line in lines
        if line["status"] not in ("equal", "not built")
    ]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="model types")
    parser.add_argument("--sample", type=int, help="how many architectures")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--counts", action="store_true", help="only count what the results say")
    args = parser.parse_args()
    if not args.counts:
        warnings.filterwarnings("ignore")
        logging.disable(logging.CRITICAL)
        torch.set_num_threads(1)
        wanted = [a for a in architectures.names() if not args.only or a[1] in args.only]
        random.Random(SEED).shuffle(wanted)
        shared = provenance()
        with ExitStack() as stack:
            file = stack.enter_context(open(os.devnull if args.only else RESULTS, "w"))
            lowtide.trace  # noqa: B018  imported once, before processes are forked
            chosen = wanted[: args.sample]
            pool = stack.enter_context(ThreadPoolExecutor(args.workers))
            for (task, kind), lines in zip(chosen, pool.map(lambda a: list(lines_of(*a, args.variants)), chosen)):
                for found in lines:
                    line = {"benchmark": "hollow_zoo_cpu", "task": task, "type": kind, **found, **shared}
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    print(
                        kind,
                        {k: v for k, v in found.items()},
                        file=sys.stderr if not args.only else sys.stdout,
                        flush=True,
                    )
    if not args.only:
        print(counts([json.loads(line) for line in RESULTS.read_text().splitlines()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
