"""Peaks traced without memory for a CUDA device beside those that CUDA's caching allocator counts.

    cd benchmarks
    python hollow_counted.py                      every architecture, variant and attention
    python hollow_counted.py --only llama t5      some architectures, printed and not written
    python hollow_counted.py --only llama --why   and the ops whose bytes differ from a trace on the device
    python hollow_counted.py --missing            only those that the results do not have yet

Needs a PyTorch with CUDA; a runtime without a GPU will do, for the allocator and the host's code decide all bytes.
A traced step's gradients are there before it begins, so the counted one's are too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hollow_counted_models import ARCHITECTURES, ATTENTIONS, PLANNED, VARIANTS, NotMade, made
from provenance import provenance

import lowtide

RESULTS = Path(__file__).parent / "results" / "hollow_counted.json"
DEVICE = "h100"
BUDGET = "60%"
CASE = ("architecture", "variant", "attention")


def counted_peak_bytes(step: Callable[[], Any]) -> int:
    """The allocator's peak in ``step``, which has run before: gradients and libraries' workspaces are there."""
    torch._C._cuda_clearCublasWorkspaces()  # those of other threads and streams are none of this step's
    step()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def traced(
    model: Any, batch: Any, step: Any, device: str | None = DEVICE, accumulate: int | None = None
) -> tuple[lowtide.StepGraph, int]:
    """The step's graph, and the peak of the step as it is."""
    torch.manual_seed(0)
    random.seed(0)
    graph = lowtide.trace(model, batch, step=step, device=device, accumulate=accumulate)
    return graph, lowtide.simulate(graph, lowtide.estimate(graph, device=DEVICE), {}).peak_bytes


def compare(kind: str, variant: str, attention: str, *, why: bool = False) -> list[dict]:
    """A line for the plain step, and one for the step under a plan; each with both peaks."""
    model, batch, loss = made(kind, variant, attention)
    graph, peak = traced(model, batch, loss)
    plan = None
    if kind in PLANNED:
        with contextlib.suppress(lowtide.BudgetInfeasibleError):
            plan = lowtide.solve(graph, lowtide.estimate(graph, device=DEVICE), budget=BUDGET)
    model, batch = model.cuda(), {name: value.cuda() for name, value in batch.items()}

    def step() -> None:
        model.zero_grad()
        torch.manual_seed(0)
        random.seed(0)
        loss(model, batch).backward()

    lines = [_line("none", peak, counted_peak_bytes(step))]
    if lines[0]["traced_peak_bytes"] != lines[0]["counted_peak_bytes"]:
        model.zero_grad()
        on_device, its_peak = traced(model, batch, loss, None)
        lines[0] |= {"traced_on_device_peak_bytes": its_peak, "ops_apart": _apart(graph, on_device)}
        if why:
            print(*lines[0]["ops_apart"], sep="\n  ")
    if plan is not None:
        with lowtide.apply(model, plan):
            lines.append(_line(BUDGET, plan.predicted_peak_bytes, counted_peak_bytes(step)))
    return lines


def _line(plan: str, traced_bytes: int, counted_bytes: int) -> dict:
    return {"plan": plan, "traced_peak_bytes": traced_bytes, "counted_peak_bytes": counted_bytes}


def _apart(hollow: lowtide.StepGraph, real: lowtide.StepGraph) -> list[str]:
    """Where the two graphs of a step differ: the resident parts, ops, workspaces, and sizes of what ops make."""
    found = Counter(
        f"resident {part}: {hollow.resident.get(part)}, on the device {real.resident.get(part)}"
        for part in hollow.resident | real.resident
        if hollow.resident.get(part) != real.resident.get(part)
    )
    for number, (a, b) in enumerate(itertools.zip_longest(hollow.ops, real.ops)):
        if a is None or b is None or a.name != b.name:
            names = [None if op is None else op.name for op in (a, b)]
            found[f"op {number}: {names[0]}, on the device {names[1]}"] += 1
            break
        described = json.dumps(hollow.signatures[a.signature])
        if a.workspace_bytes != b.workspace_bytes:
            found[f"{a.name} workspace {a.workspace_bytes}, on the device {b.workspace_bytes} {described}"] += 1
        made_bytes = [[g.storages[s].bytes for s in op.makes] for g, op in ((hollow, a), (real, b))]
        if made_bytes[0] != made_bytes[1]:
            found[f"{a.name} makes {made_bytes[0]}, on the device {made_bytes[1]} {described}"] += 1
    return [f"{count} x {what}" for what, count in found.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="architectures")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--why", action="store_true", help="print which ops' bytes differ")
    parser.add_argument("--missing", action="store_true", help="keep the results that there are")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this PyTorch finds no CUDA device; see make test-cuda")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # a block is what was asked for
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = json.loads(RESULTS.read_text())["lines"] if args.missing and RESULTS.exists() else []
    known = {tuple(line[name] for name in CASE) for line in lines}
    shared = provenance()
    for kind, variant, attention in itertools.product(args.only or ARCHITECTURES, args.variants, ATTENTIONS):
        if (kind, variant, attention) in known:
            continue
        case = dict(zip(CASE, (kind, variant, attention)))
        gc.collect()
        torch.cuda.empty_cache()
        try:
            found = compare(kind, variant, attention, why=args.why)
        except NotMade:
            continue
        except Exception as error:
            if args.why:
                raise
            found = [{"plan": "none", "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}]
        for line in found:
            lines.append(case | line)
            apart = line.get("traced_peak_bytes", 0) - line.get("counted_peak_bytes", 0)
            print(kind, variant, attention, line["plan"], f"{apart:+d}", line.get("error", ""), flush=True)
        if not args.only:
            body = {"benchmark": "hollow_counted", **shared, "target": DEVICE, "lines": lines}
            RESULTS.write_text(json.dumps(body, indent=1) + "\n")
    equal = sum(line.get("traced_peak_bytes") == line.get("counted_peak_bytes", -1) for line in lines)
    print(f"{equal} of {len(lines)} equal to the byte")
    return 0


if __name__ == "__main__":
    sys.exit(main())
