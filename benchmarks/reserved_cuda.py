"""Memory that a training is foreseen to reserve beside what CUDA's caching allocator reserves for it.

    cd benchmarks
    python reserved_cuda.py                      every architecture, precision, plan and kind of segments
    python reserved_cuda.py --only llama t5      some architectures, printed and not written
    python reserved_cuda.py --missing            only those that the results do not have yet; with --only, some of them

Needs a PyTorch with CUDA; a runtime without a GPU will do. Each training begins with nothing cached: the model is
moved, then come four steps with AdamW, their gradients freed by ``zero_grad()``. Foreseen is ``training_peaks`` of a
trace without memory; counted is ``torch.cuda.max_memory_reserved()``.

The stand-in computes no values of large tensors (``STANDIN_SKIP_BYTES``), which decide no bytes, but for models whose
routers choose experts.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hollow_counted_models import ARCHITECTURES, NotMade, made
from provenance import provenance

import lowtide
from lowtide.plan import Moves
from lowtide.simulation.allocator_peaks import MOST_STEPS, training_peaks

RESULTS = Path(__file__).parent / "results" / "reserved_cuda.json"
DEVICE = "h100"
VARIANTS = ("float32", "bfloat16 autocast", "bfloat16")
BUDGET = "60%"
OPS_TO_SOLVE = 10_000  # of a step with more, a scan written as a loop, the plan is that of every layer
ROUTED = ("mixtral", "qwen2_moe", "deepseek_v3")  # values choose the experts
WITHOUT_VALUES = {"STANDIN_SKIP_BYTES": str(1 << 16), "LOWTIDE_WITHOUT_VALUES": "1"}
SEGMENTS = {"fixed": False, "expandable": True}
CASE = ("architecture", "variant", "rows")
ROWS = (2, 32)  # so that most blocks are of the small pool, and of the large one
MIB = 2**20


@contextlib.contextmanager
def nothing_cached(expandable: bool) -> Iterator[None]:
    """The allocator as at the start of a process whose segments grow, or do not."""
    _empty()
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
    try:
        yield
    finally:
        _empty()
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def _empty() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if left := torch.cuda.memory_allocated():
        raise RuntimeError(f"{left} bytes of an earlier case are still there")


def counted_bytes(kind: str, variant: str, attention: str, rows: int, plan: lowtide.Plan | None) -> tuple[int, int]:
    """(allocated, reserved): the allocator's peaks of a training that begins."""
    model, batch, loss = made(kind, variant, attention, rows)
    model.cuda()
    batch = {name: value.cuda() for name, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters())
    with contextlib.nullcontext() if plan is None else lowtide.apply(model, plan):
        for _ in range(MOST_STEPS):
            optimizer.zero_grad()
            torch.manual_seed(0)
            random.seed(0)
            loss(model, batch).backward()
            optimizer.step()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def compare(kind: str, variant: str, rows: int) -> list[dict]:
    """A line for each plan and kind of segments."""
    attention, (model, batch, loss) = _made(kind, variant, rows)
    torch.manual_seed(0)
    random.seed(0)
    optimizer = torch.optim.AdamW(model.parameters())
    graph = lowtide.trace(model, batch, step=loss, device=DEVICE, optimizer=optimizer)
    plans: dict[str, lowtide.Plan | None] = {"none": None}
    costs = lowtide.estimate(graph, device=DEVICE)
    if len(graph.ops) > OPS_TO_SOLVE:
        plans["every layer"] = lowtide.solve(graph, costs, method="full")
    else:
        with contextlib.suppress(lowtide.BudgetInfeasibleError):
            plans[BUDGET] = lowtide.solve(graph, costs, budget=BUDGET, time_limit_s=10)
    del model, batch, loss, optimizer
    lines = []
    for (name, plan), (segments, expandable) in itertools.product(plans.items(), SEGMENTS.items()):
        actions, replays, moves = (
            ({}, {}, Moves()) if plan is None else (plan.action_of(), plan.replays_of(), plan.moves)
        )
        foreseen = training_peaks(graph, actions, replays, moves, expandable_segments=expandable)
        assert foreseen is not None
        with nothing_cached(expandable):
            allocated, reserved = counted_bytes(kind, variant, attention, rows, plan)
        lines.append({
            "plan": name, "segments": segments, "foreseen_reserved_bytes": foreseen.reserved_bytes,
            "reserved_bytes": reserved, "foreseen_counted_bytes": foreseen.counted_bytes, "counted_bytes": allocated,
        })  # fmt: skip
    return lines


def _made(kind: str, variant: str, rows: int) -> tuple[str, Any]:
    """With fused attention where there is one."""
    try:
        return "sdpa", made(kind, variant, "sdpa", rows)
    except NotMade:
        return "eager", made(kind, variant, "eager", rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="architectures; those with routers in a run of their own")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--rows", nargs="+", default=ROWS, type=int, choices=ROWS)
    parser.add_argument("--missing", action="store_true", help="keep the results that there are")
    args = parser.parse_args()
    values = bool(set(args.only or ()) & set(ROUTED))
    if not values and not os.environ.keys() & WITHOUT_VALUES:  # they are read when torch is imported
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | WITHOUT_VALUES)
    if not torch.cuda.is_available():
        parser.error("this PyTorch finds no CUDA device; see make test-cuda")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    known = {_case(line) for line in _written()} if args.missing else set()
    lines: list[dict] = []
    shared = provenance()
    for case in itertools.product(args.only or ARCHITECTURES, args.variants, args.rows):
        if case in known or (case[0] in ROUTED and not values):
            continue
        try:
            found = compare(*case)
        except Exception as error:
            found = [{"plan": "none", "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}]
        for line in found:
            lines.append(dict(zip(CASE, case)) | line | {"commit": shared["commit"]})
            off = (line.get("foreseen_reserved_bytes", 0) - line.get("reserved_bytes", 0)) / MIB
            also = line.get("foreseen_counted_bytes", 0) - line.get("counted_bytes", 0)
            print(
                *case, line["plan"], line.get("segments", ""), f"{off:+.0f} MiB {also:+d}",
                f"of {line.get('reserved_bytes', 0) / MIB:.0f}", line.get("error", ""), flush=True,
            )  # fmt: skip
        if args.missing or not args.only:
            ran = {_case(line) for line in lines}
            others = [line for line in _written() if _case(line) not in ran] if args.missing else []
            body = {"benchmark": "reserved_cuda", **shared, "target": DEVICE, "lines": [*others, *lines]}
            RESULTS.write_text(json.dumps(body, indent=1) + "\n")
    compared = [line for line in lines if "error" not in line]
    off = [line["foreseen_reserved_bytes"] - line["reserved_bytes"] for line in compared]
    print(f"{off.count(0)} of {len(off)} exact; lowest {min(off, default=0) / MIB:+.0f} MiB")
    return 0


def _written() -> list[dict]:
    """Lines of the results; another run may add to them meanwhile."""
    return json.loads(RESULTS.read_text())["lines"] if RESULTS.exists() else []


def _case(line: dict) -> tuple:
    return tuple(line[name] for name in CASE)


if __name__ == "__main__":
    sys.exit(main())
