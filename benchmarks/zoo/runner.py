"""Runs the zoo: each architecture in a process of its own, one JSON line per variant, then the page.

    cd benchmarks
    python -m zoo                     everything, 90 minutes of one core; writes docs/supported.md
    python -m zoo --published         with plans of published methods as well
    python -m zoo --resume            continues a run that was interrupted
    python -m zoo --only llama t5     some architectures, printed and not written
    python -m zoo --page              writes docs/supported.md again, from the results

An architecture that hangs, dies or takes too much memory is a line in the table.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
from provenance import provenance

import lowtide
from zoo import architectures, page
from zoo.examine import VARIANTS, examine

RESULTS = Path(__file__).parents[1] / "results" / "zoo_cpu.jsonl"
LIMIT_S = 900.0
LIMIT_BYTES = 9 << 30  # of address space: one architecture once took 21 GB


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
        wanted = [s for s in architectures.names() if not args.only or s[1] in args.only]
        if args.only:
            for line in run_all(wanted, args):
                print(json.dumps(line))
            return 0
        run_to_file(wanted, args)
    page.write([json.loads(line) for line in RESULTS.read_text().splitlines()])
    return 0


def run_to_file(wanted: list[tuple[str, str]], args: argparse.Namespace) -> None:
    """Write all lines to ``RESULTS``; what an interrupted run has done is in a file beside it, for ``--resume``."""
    partial = RESULTS.with_suffix(".partial")
    if not args.resume:
        partial.unlink(missing_ok=True)
    done = [json.loads(line) for line in partial.read_text().splitlines()] if partial.exists() else []
    # What could not be built is tried again.
    done = [line for line in done if line["variant"] != VARIANTS[0] or line["status"] != "not built"]
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
    """Merge ``partial`` into ``RESULTS``, in place of older lines for the same architectures."""
    found = {}
    for path in (RESULTS, partial):
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        replaced = {(line["task"], line["type"]) for line in lines}
        found = {key: line for key, line in found.items() if key[:2] not in replaced}
        found |= {(line["task"], line["type"], VARIANTS.index(line["variant"])): line for line in lines}
    RESULTS.write_text("".join(json.dumps(found[key]) + "\n" for key in sorted(found)))


def run_all(wanted: list[tuple[str, str]], args: argparse.Namespace) -> Iterator[dict]:
    """Yield lines as they are finished, and report each architecture on stderr."""
    torch.set_num_threads(1)
    shared = provenance()
    _warm_up()
    with ThreadPoolExecutor(args.workers) as pool:
        jobs = {pool.submit(examine_in_process, task, kind, args.published): (task, kind) for task, kind in wanted}
        for done, job in enumerate(as_completed(jobs), start=1):
            task, kind = jobs[job]
            found = job.result()
            verdicts = ", ".join(line["status"] for line in found)
            print(f"[{done}/{len(jobs)}] {kind} ({task}): {verdicts}", file=sys.stderr, flush=True)
            yield from ({"benchmark": "zoo_cpu", "task": task, "type": kind, **line, **shared} for line in found)


def _warm_up() -> None:
    """Import and build once what every forked process would otherwise import and collect again: most of its time."""
    import peft  # noqa: F401

    for task, kind in (("causal language", "llama"), ("image classification", "vit")):
        architectures.build(task, kind)
    for verb in ("trace", "solve", "verify"):
        getattr(lowtide, verb)
    gc.collect()
    gc.freeze()


def examine_in_process(task: str, kind: str, published: bool) -> list[dict]:
    """All variants of one architecture, in a process that may die."""
    with tempfile.NamedTemporaryFile("r") as file:
        process = multiprocessing.get_context("fork").Process(
            target=_write_lines, args=(task, kind, published, file.name)
        )
        process.start()
        process.join(LIMIT_S)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        found = [json.loads(line) for line in file]
    if late or process.exitcode:
        how = f"no end after {LIMIT_S:.0f} s" if late else f"the process ended with {process.exitcode}"
        done = [line["variant"] for line in found]
        variant = next((v for v in VARIANTS if v not in done), VARIANTS[-1])
        found.append({"variant": variant, "status": "died", "reason": how})
    return found


def _write_lines(task: str, kind: str, published: bool, path: str) -> None:
    warnings.filterwarnings("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for line in examine(task, kind, published=published):
            with open(path, "a") as lines:
                lines.write(json.dumps(line) + "\n")
    os._exit(0)  # exit handlers that were registered before the fork belong to the parent
