"""Every architecture that ``zoo_models`` can build, bitwise: loss, all gradients, all buffers; one JSON line a variant.

    python benchmarks/zoo.py                          all of it, an hour of one core; writes docs/supported.md
    python benchmarks/zoo.py --exact                  likewise, with exact plans for every variant: hours
    python benchmarks/zoo.py --brief                  all replayed, and half, alone: a third of the time
    python benchmarks/zoo.py --resume                 goes on where the last run was interrupted
    python benchmarks/zoo.py --only llama t5 vit      some, printed and not written
    python benchmarks/zoo.py --page                   docs/supported.md again, from the results there are

Variants: float32; bfloat16 autocast; dropout on; LoRA through PEFT on frozen weights. Plans that take no search, for
each: everything that may be recomputed is; layers checkpointed whole; PyTorch's own knapsack at half the stored bytes.
Plans of the exact method, for float32: at half of the activation memory, where there is one that small, and at the
least for which a short search (``QUICKLY``) finds one, to 7 % of it. Each architecture runs in a process of its own,
so that one that hangs or dies is a line in the table.
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
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zoo_models
from provenance import provenance
from torch import nn

import lowtide
from lowtide.solvers.draft import Draft, finish
from lowtide.solvers.exact import Limits, Search
from lowtide.solvers.structure import close

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "zoo_cpu.jsonl"
PAGE = HERE.parent / "docs" / "supported.md"
MARK = "<!-- From here on: made by benchmarks/zoo.py from its results. -->"
VARIANTS = ("float32", "bfloat16 autocast", "dropout", "LoRA")
LIMIT_S = 600.0
SHOWN = {  # plans, on the page
    "all replayed": "all replayed",
    "full": "layers whole",
    "knapsack 0.5": "knapsack",
    "half": "exact at 50 %",
    "least": "exact near the least",
}
REASONS = {  # why an architecture was not tried, by what its error says
    "two plain steps": "Two plain steps from one state differ (it seeds generators itself)",
    "no loss": "It returns no loss",
    "ImportError": "Needs a package that is not installed",
    "ModuleNotFoundError": "Needs a package that is not installed",
}
QUICKLY = Limits(time_limit_s=2.0, node_limit=5, gap=0.1)  # a plan that is not the best is as good a test
RESOLUTION = 0.07  # of the activation memory: how near to the least
SEARCH_S = 8.0  # after which no further budget is tried


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="model types")
    parser.add_argument("--exact", action="store_true", help="exact plans for every variant, not for the first alone")
    parser.add_argument("--brief", action="store_true", help="all replayed, and half of the memory, alone")
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
    write_page([json.loads(line) for line in RESULTS.read_text().splitlines()])
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
    """Put what is done in order."""
    lines = [json.loads(line) for line in partial.read_text().splitlines()]
    lines.sort(key=lambda line: (line["task"], line["type"], VARIANTS.index(line["variant"])))
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_all(wanted: list[tuple[str, str]], args: argparse.Namespace) -> Iterator[dict]:
    """Lines as they come, with a word on stderr for each architecture."""
    torch.set_num_threads(1)
    shared = provenance()
    _warm_up()
    exact = VARIANTS if args.exact else VARIANTS[:1]
    with ThreadPoolExecutor(args.workers) as pool:
        jobs = {pool.submit(apart, task, kind, exact, args.brief): (task, kind) for task, kind in wanted}
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


def apart(task: str, kind: str, exact: Sequence[str], brief: bool) -> list[dict]:
    """All variants of one architecture, in a process that may die."""
    with tempfile.NamedTemporaryFile("r") as told:
        process = multiprocessing.get_context("fork").Process(target=_tell, args=(task, kind, exact, brief, told.name))
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


def _tell(task: str, kind: str, exact: Sequence[str], brief: bool, path: str) -> None:
    warnings.filterwarnings("ignore")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for line in examine(task, kind, exact=exact, brief=brief):
            with open(path, "a") as lines:
                lines.write(json.dumps(line) + "\n")
    os._exit(0)  # what others registered to run at exit is about their process


def examine(
    task: str, kind: str, variants: Sequence[str] = VARIANTS, exact: Sequence[str] = VARIANTS[:1], brief: bool = False
) -> Iterator[dict]:
    """One line for each of ``variants``, those in ``exact`` under exact plans too; ``brief`` as on the command line.

    A single one where the architecture cannot be built.
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
            line |= compare(model, specimen.batch, step, variant in exact, brief)
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
            return model(**batch).loss

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


def compare(model: nn.Module, batch: dict, step: Callable, exact: bool, brief: bool = False) -> dict[str, Any]:
    """The status, and what was compared."""
    graph = lowtide.trace(model, batch, step=step)
    plans = plans_for(graph, plausible_costs(graph), exact, brief)
    differing: dict[str, list[str]] = {}
    off = 0.0
    mismatched = dropped = 0
    for name, plan in plans.items():
        seen = lowtide.verify(model, batch, plan, step=step, rounds=0)
        if not seen.equal:
            differing[name] = list(seen.differing)[:3]
        off = max(off, abs(seen.predicted_peak_bytes / seen.measured_peak_bytes - 1))
        mismatched += seen.mismatched_ops
        dropped = max(dropped, seen.dropped_ops)
    return {
        "status": "differs" if differing else "equal",
        "differing": differing,
        "plans": {name: round(plan.predicted_fraction, 4) for name, plan in plans.items()},
        "ops": len(graph.ops),
        "dropped_ops": dropped,
        "mismatched_ops": mismatched,
        "plain_peak_bytes": plans["all replayed"].plain_peak_bytes,
        "least_bytes": min(plan.predicted_peak_bytes for plan in plans.values()),
        "peak_off": off,
    }


def plans_for(
    graph: lowtide.StepGraph, costs: lowtide.Costs, exact: bool, brief: bool = False
) -> dict[str, lowtide.Plan]:
    """What to try, by name."""
    everything = Draft(close(graph, graph.stored))
    plans = {"all replayed": finish(graph, costs, everything, method="all", budget_bytes=None, start_s=0.0)}
    if not brief:
        with contextlib.suppress(ValueError):  # no layer repeats
            plans["full"] = lowtide.solve(graph, costs, method="full")
        plans["knapsack 0.5"] = lowtide.solve(graph, costs, method="knapsack", ratio=0.5)
    for name, draft in (_searched(graph, costs, brief) if exact else {}).items():
        plans[name] = finish(graph, costs, draft, method="exact", budget_bytes=None, start_s=0.0)
    return plans


def _searched(graph: lowtide.StepGraph, costs: lowtide.Costs, half_alone: bool) -> dict[str, Draft]:
    """At half of the activation memory, if a plan is found there, and at the least, by bisection over budgets.

    What the exact method does where it finds nothing (prove the least peak, try schedules of many replays) is left out:
    it takes minutes on some.
    """
    search = Search(graph, costs, QUICKLY)
    span_bytes = search.plain.peak_bytes - graph.resident_bytes
    start_s = time.perf_counter()

    def within(fraction: float) -> Draft | None:
        budget_bytes = graph.resident_bytes + int(fraction * span_bytes)
        fitting = [j for j in search.fastest(budget_bytes).judged if j.peak_bytes <= budget_bytes]
        return Draft(fitting[-1].actions, "feasible") if fitting else None

    half = leanest = within(0.5)
    drafts = {} if half is None else {"half": half}
    fits, too_little = (1.0, 0.5) if half is None else (0.5, 0.0)
    while not half_alone and fits - too_little > RESOLUTION and time.perf_counter() - start_s < SEARCH_S:
        fraction = (fits + too_little) / 2
        draft = within(fraction)
        if draft is None:
            too_little = fraction
        else:
            leanest, fits = draft, fraction
    return drafts if leanest is half or leanest is None else drafts | {"least": leanest}


def plausible_costs(graph: lowtide.StepGraph) -> lowtide.Costs:
    """Not measured but made from bytes, so that plans are the same everywhere; matmuls weigh ten times more."""
    heavy = ("mm", "conv", "attention", "linear", "scan")
    size = [s.bytes for s in graph.storages]
    moved = [sum(size[s] for s in {*op.reads, *op.makes}) for op in graph.ops]
    weight = [10 if any(part in op.name for part in heavy) else 1 for op in graph.ops]
    return lowtide.Costs(tuple(0.002 + count * times / 1e6 for count, times in zip(moved, weight, strict=True)))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


# The page


def write_page(lines: list[dict]) -> None:
    """Put the results below the mark in docs/supported.md; what stands above is written by hand."""
    above = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(above + MARK + "\n\n" + "\n".join(page(lines)) + "\n")


def page(lines: list[dict]) -> list[str]:
    """The generated part."""
    variants: dict[tuple[str, str], dict[str, dict]] = defaultdict(dict)
    for line in lines:
        variants[line["task"], line["type"]][line["variant"]] = line
    built = {key: found for key, found in variants.items() if found.get("float32", {}).get("status") != "not built"}
    tried = [line for found in built.values() for line in found.values() if line["status"] != "not built"]
    equal = [line for line in tried if line["status"] == "equal"]
    types = {kind for _, kind in built}
    left = sum(specimen not in variants for specimen in zoo_models.specimens())
    waiting = f"; {left} classes have not been run yet" if left else ""
    last = max(lines, key=lambda line: line["date"])
    text = [
        f"{len(types)} model types in {len(built)} classes, {len(tried)} variants tried, **{len(equal)} bitwise equal "
        f"under every plan**{waiting} (torch {last['torch']}, "
        f"transformers {last['transformers']}, {last['date']}). {_carried_out(equal)}",
        "",
    ]
    for task in dict.fromkeys(task for task, _ in built):
        whole = sorted((k, found) for (t, k), found in built.items() if t == task and _all_equal(found))
        names = ", ".join(f"`{k}`" + ("*" if _blind(task, found) else "") for k, found in whole)
        text += [f"**{task.capitalize()}** ({len(whole)}): {names}", ""]
    if any(_blind(task, found) for (task, _), found in built.items()):
        text += ["\\* on text alone: where the model expects its image is not known here.", ""]
    others = [
        (kind, task, line)
        for (task, kind), found in sorted(built.items())
        for line in found.values()
        if line["status"] not in ("equal", "not built")
    ]
    text += ["## Not equal, refused or failed", ""]
    if others:
        text += ["| model type | task | variant | what happens |", "|---|---|---|---|"]
        text += [f"| `{kind}` | {task} | {line['variant']} | {_what(line)} |" for kind, task, line in others]
    else:
        text.append("None.")
    text += _not_tried(variants, built)
    return text


def _carried_out(equal: list[dict]) -> str:
    """How often each plan was, and how low the exact ones went."""
    counts = Counter(name for line in equal for name in line.get("plans", ()))
    if not counts:
        return ""
    fractions = sorted(line["plans"]["least"] for line in equal if "least" in line.get("plans", ()))
    told = ", ".join(f"{SHOWN.get(name, name)} {count}" for name, count in counts.items())
    middle = f"; half of those leave at most {fractions[len(fractions) // 2]:.0%}" if fractions else ""
    return f"Plans carried out: {told}{middle}."


def _blind(task: str, found: dict[str, dict]) -> bool:
    """An image and text model that saw no image."""
    inputs = found.get("float32", {}).get("inputs", ["pixel"])
    return task == "image and text" and not any("pixel" in name or "patches" in name for name in inputs)


def _not_tried(
    variants: dict[tuple[str, str], dict[str, dict]], built: dict[tuple[str, str], dict[str, dict]]
) -> list[str]:
    """Architectures, and variants of the others, that do not run by themselves, by reason."""
    whole: dict[str, list[str]] = defaultdict(list)
    for (task, kind), found in sorted(variants.items()):
        if (task, kind) not in built:
            whole[_why(found["float32"]["reason"])].append(f"`{kind}` ({task})")
    text = ["", f"## Not tried ({sum(map(len, whole.values()))})", ""]
    text += [f"- {why}: {', '.join(kinds)}" for why, kinds in sorted(whole.items())]
    parts: dict[str, list[str]] = defaultdict(list)
    for (_, kind), found in sorted(built.items()):
        for line in found.values():
            if line["status"] == "not built":
                parts[line["variant"]].append(f"`{kind}`")
    if parts:
        text += [
            "",
            "Variants that fail without lowtide too (a dtype that autocast mixes, layers that PEFT does not know):",
        ]
        text += ["", *(f"- {variant}: {', '.join(kinds)}" for variant, kinds in sorted(parts.items()))]
    return text


def _why(reason: str) -> str:
    """A reason in words of the page."""
    for part, why in REASONS.items():
        if part in reason:
            return why
    return "No small configuration or batch is known"


def _all_equal(found: dict[str, dict]) -> bool:
    return all(line["status"] in ("equal", "not built") for line in found.values())


def _what(line: dict) -> str:
    if line["status"] == "differs":
        plans = "; ".join(f"{plan}: {', '.join(names)}" for plan, names in line["differing"].items())
        return f"differs ({plans})"
    return f"{line['status']}: {line.get('reason', '')}".replace("|", "/")


if __name__ == "__main__":
    sys.exit(main())
