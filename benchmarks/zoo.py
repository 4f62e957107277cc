"""Every architecture that ``zoo_models`` can build, bitwise: loss, all gradients, all buffers; one JSON line a variant.

    python benchmarks/zoo.py                          all of it, 90 minutes of one core; writes docs/supported.md
    python benchmarks/zoo.py --published              likewise, with plans of published methods as well
    python benchmarks/zoo.py --resume                 goes on where the last run was interrupted
    python benchmarks/zoo.py --only llama t5 vit      some, printed and not written
    python benchmarks/zoo.py --page                   docs/supported.md again, from the results there are

Variants: float32; bfloat16 autocast; dropout on; LoRA through PEFT on frozen weights. The plans of each: everything
that may be recomputed is; and of the exact method, under limits (``QUICKLY``), one at the tightest budget that it finds
and one at half of the activation memory where the tightest is below; of published methods, layers checkpointed whole
and PyTorch's own knapsack at half the stored bytes. Each architecture runs in a process of its own, so that
one that hangs, dies or takes too much memory is a line in the table.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zoo_models
import zoo_page
from provenance import provenance
from torch import nn
from zoo_batches import loss_of

import lowtide
from lowtide.gc_control import gc_disabled
from lowtide.solvers.build_plan import build_plan
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.exact import ExactSearch
from lowtide.solvers.graph_queries import complete_actions
from lowtide.solvers.lower_bound.bound import bound_peak
from lowtide.solvers.peak_report import bottleneck
from lowtide.solvers.search_context import Limits

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "zoo_cpu.jsonl"
VARIANTS = ("float32", "bfloat16 autocast", "dropout", "LoRA")
LIMIT_S = 900.0
LIMIT_BYTES = 9 << 30  # of address space: one architecture once took 21 GB
QUICKLY = Limits(
    time_limit_s=0.3, node_limit=5, gap=0.1, local_search_share=0.2, multi_segment=False
)  # a plan that is not the fastest is as good a test


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="model types")
    parser.add_argument("--published", action="store_true", help="plans of published methods as well")
    parser.add_argument("--resume", action="store_true", help="go on where the last run was interrupted")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 4))
    parser.add_argument("--page", action="store_true", help="only write the page from the results")
    args = parser.parse_args()
    partial = RESULTS.with_suffix(".partial")
    if args.page and partial.exists():
        keep(partial)
    if not args.page:
        wanted = [s for s in zoo_models.specimens() if not args.only or s[1] in args.only]
        if args.only:
            for line in run_all(wanted, args):
                print(json.dumps(line))
            return 0
        run_to_file(wanted, args)
    zoo_page.write([json.loads(line) for line in RESULTS.read_text().splitlines()])
    return 0


def run_to_file(wanted: list[tuple[str, str]], args: argparse.Namespace) -> None:
    """All of it into ``RESULTS``; interrupted, what is done is in a file beside, from which ``--resume`` goes on."""
    partial = RESULTS.with_suffix(".partial")
    if not args.resume:
        partial.unlink(missing_ok=True)
    done = [json.loads(line) for line in partial.read_text().splitlines()] if partial.exists() else []
    done = [line for line in done if line["variant"] != VARIANTS[0] or line["status"] != "not built"]  # those anew
    partial.write_text("".join(json.dumps(line) + "\n" for line in done))
    seen = {(line["task"], line["type"]) for line in done}
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("a") as file:
        for line in run_all([s for s in wanted if s not in seen], args):
            file.write(json.dumps(line) + "\n")
            file.flush()
    keep(partial)
    partial.unlink()


def keep(partial: Path) -> None:
    """Put what is done in order, in place of older results for the same; others stay."""
    found = {}
    for path in (RESULTS, partial):
        told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        again = {(line["task"], line["type"]) for line in told}
        found = {key: line for key, line in found.items() if key[:2] not in again}
        found |= {(line["task"], line["type"], VARIANTS.index(line["variant"])): line for line in told}
    RESULTS.write_text("".join(json.dumps(found[key]) + "\n" for key in sorted(found)))


def run_all(wanted: list[tuple[str, str]], args: argparse.Namespace) -> Iterator[dict]:
    """Lines as they come, with a word on stderr for each architecture."""
    torch.set_num_threads(1)
    shared = provenance()
    _warm_up()
    with ThreadPoolExecutor(args.workers) as pool:
        jobs = {pool.submit(apart, task, kind, args.published): (task, kind) for task, kind in wanted}
        for done, job in enumerate(as_completed(jobs), start=1):
            task, kind = jobs[job]
            found = job.result()
            verdicts = ", ".join(line["status"] for line in found)
            print(f"[{done}/{len(jobs)}] {kind} ({task}): {verdicts}", file=sys.stderr, flush=True)
            yield from ({"benchmark": "zoo_cpu", "task": task, "type": kind, **line, **shared} for line in found)


def _warm_up() -> None:
    """What every process would otherwise load, and look through at each collection, for itself: most of its time."""
    import peft  # noqa: F401

    for task, kind in (("causal language", "llama"), ("image classification", "vit")):
        zoo_models.build(task, kind)
    for verb in ("trace", "solve", "verify"):
        getattr(lowtide, verb)
    gc.collect()
    gc.freeze()


def apart(task: str, kind: str, published: bool) -> list[dict]:
    """All variants of one architecture, in a process that may die."""
    with tempfile.NamedTemporaryFile("r") as told:
        process = multiprocessing.get_context("fork").Process(target=_tell, args=(task, kind, published, told.name))
        process.start()
        process.join(LIMIT_S)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        found = [json.loads(line) for line in told]
    if late or process.exitcode:
        how = f"no end after {LIMIT_S:.0f} s" if late else f"the process ended with {process.exitcode}"
        done = [line["variant"] for line in found]
        variant = next((v for v in VARIANTS if v not in done), VARIANTS[-1])
        found.append({"variant": variant, "status": "died", "reason": how})
    return found


def _tell(task: str, kind: str, published: bool, path: str) -> None:
    warnings.filterwarnings("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for line in examine(task, kind, published=published):
            with open(path, "a") as lines:
                lines.write(json.dumps(line) + "\n")
    os._exit(0)  # what others registered to run at exit is about their process


def examine(
    task: str, kind: str, variants: Sequence[str] = VARIANTS, *, searched: bool = True, published: bool = False
) -> Iterator[dict]:
    """One line for each of ``variants``; a single one where the architecture cannot be built.

    Args:
        searched: Plans of the exact method too. ``published``: those of published methods.
    """
    for variant in variants:
        start = time.perf_counter()
        try:
            specimen = zoo_models.build(task, kind, dropout=0.1 if variant == "dropout" else None)
        except zoo_models.CannotBuild as error:
            yield {"variant": variant, "status": "not built", "reason": str(error)}
            return
        line = {"variant": variant, "class": specimen.name, "inputs": sorted(specimen.batch)}
        try:
            model, step = prepare(specimen, variant)
            plainly(model, specimen.batch, step)
        except Exception as error:  # the model's own, without lowtide
            yield line | {"status": "not built", "reason": _first_line(error)}
            if variant == VARIANTS[0]:
                return
            continue
        try:
            line |= compare(model, specimen.batch, step, searched=searched, published=published)
        except lowtide.UnsupportedModelError as error:
            line |= {"status": "refused", "reason": _first_line(error)}
        except Exception as error:
            line |= {"status": "failed", "reason": f"{type(error).__name__}: {_first_line(error)}"}
        yield line | {"seconds": round(time.perf_counter() - start, 1)}


def prepare(specimen: zoo_models.Specimen, variant: str) -> tuple[nn.Module, Callable]:
    """The model as the variant has it, and the step."""
    model = with_lora(specimen.model) if variant == "LoRA" else specimen.model

    def step(model: nn.Module, batch: dict) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=variant == "bfloat16 autocast"):
            return loss_of(model(**batch))

    return model, step


def with_lora(model: nn.Module) -> nn.Module:
    """Adapters on frozen weights: on all linear layers with dropout, or on what PEFT will have for the architecture."""
    import peft

    refused: Exception | None = None
    for targets, dropout in (("all-linear", 0.1), ("all-linear", 0.0), (["in_proj", "x_proj"], 0.1)):
        config = peft.LoraConfig(r=2, target_modules=targets, lora_dropout=dropout)
        try:
            return peft.get_peft_model(copy.deepcopy(model), config).train()
        except (ValueError, TypeError) as error:
            refused = refused or error
    assert refused is not None
    raise refused


def plainly(model: nn.Module, batch: dict, step: Callable) -> None:
    """The step without lowtide, twice from one state: what does not repeat itself cannot be compared."""
    found = []
    buffers = [b.detach().clone() for b in model.buffers()]
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        torch.manual_seed(0)
        loss = step(model, batch)
        if loss is None:
            raise ValueError("it returns no loss for this batch")
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters()]))
        model.zero_grad(set_to_none=True)
    (one, ones), (two, twos) = found
    same = torch.equal(one, two) and all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(ones, twos, strict=True)
    )
    if not same and torch.isfinite(one):
        raise ValueError("two plain steps from one state differ")
    if not torch.isfinite(one):
        raise ValueError(f"its loss is {one.item()}")


def compare(model: nn.Module, batch: dict, step: Callable, *, searched: bool, published: bool) -> dict[str, Any]:
    """The status, and what was compared."""
    graph = lowtide.trace(model, batch, step=step)
    costs = plausible_costs(graph)
    plans = plans_without_search(graph, costs, published=published)
    told = {}
    if searched:
        with gc_disabled():
            found, told = plans_searched(graph, costs)
        plans |= found
    seen = {name: lowtide.verify(model, batch, plan, step=step, rounds=0) for name, plan in plans.items()}
    differing = {name: list(proof.differing)[:3] for name, proof in seen.items() if not proof.equal}
    return {
        "status": "differs" if differing else "equal",
        "differing": differing,
        "plans": {name: round(plan.predicted_fraction, 4) for name, plan in plans.items()},
        "peaks": {name: [v.predicted_peak_bytes, v.measured_peak_bytes] for name, v in seen.items()},
        **told,
        "ops": len(graph.ops),
        "dropped_ops": max(proof.dropped_ops for proof in seen.values()),
        "mismatched_ops": sum(proof.mismatched_ops for proof in seen.values()),
        "plain_peak_bytes": plans["all replayed"].plain_peak_bytes,
    }


def plans_without_search(graph: lowtide.StepGraph, costs: lowtide.Costs, *, published: bool) -> dict[str, lowtide.Plan]:
    """What to try of methods that know no budget, by name."""
    everything = Candidate(complete_actions(graph, graph.stored))
    plans = {"all replayed": build_plan(graph, costs, everything, method="all", budget_bytes=None, start_s=0.0)}
    if published:
        with contextlib.suppress(ValueError):  # no layer repeats
            plans["full"] = lowtide.solve(graph, costs, method="full")
        plans["knapsack 0.5"] = lowtide.solve(graph, costs, method="knapsack", ratio=0.5)
    return plans


def plans_searched(
    graph: lowtide.StepGraph, costs: lowtide.Costs
) -> tuple[dict[str, lowtide.Plan], dict[str, float | str]]:
    """The exact method's at its tightest budget, and at half where that is tighter; and else what stands in the way."""
    search = ExactSearch(graph, costs, QUICKLY)
    least, span_bytes = search.min_peak, search.plain.peak_bytes - graph.resident_bytes
    drafts = {"least": Candidate(least.actions, "feasible", replays=least.replays)}
    half_bytes = graph.resident_bytes + span_bytes // 2
    told: dict[str, float | str] = {}
    if least.peak_bytes <= half_bytes:
        drafts["half"] = search.within(half_bytes)
    else:
        told = {
            "floor": round((bound_peak(graph) - graph.resident_bytes) / span_bytes, 4),
            "in_the_way": bottleneck(graph, drafts["least"], least.timeline),
        }
    plans = {
        name: build_plan(graph, costs, draft, method="exact", budget_bytes=None, start_s=0.0)
        for name, draft in drafts.items()
    }
    return plans, told


def plausible_costs(graph: lowtide.StepGraph) -> lowtide.Costs:
    """Not measured but made from bytes, so that plans are the same everywhere; matmuls weigh ten times more."""
    heavy = ("mm", "conv", "attention", "linear", "scan")
    size = [s.bytes for s in graph.storages]
    moved = [sum(size[s] for s in {*op.reads, *op.makes}) for op in graph.ops]
    weight = [10 if any(part in op.name for part in heavy) else 1 for op in graph.ops]
    return lowtide.Costs(tuple(0.002 + count * times / 1e6 for count, times in zip(moved, weight, strict=True)))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


if __name__ == "__main__":
    sys.exit(main())
