"""Published GPU measurements and out-of-memory errors, re-created by running their scripts under ``lowtide pretend``.

    cd benchmarks
    python pretend_published.py --sources DIR           runs that have no result yet
    python pretend_published.py --sources DIR --again W  runs whose name holds the word, once more
    python pretend_published.py --sources DIR --most 3  no more than three runs, for a machine that others use too

Each run has the PyTorch and the packages of its time (``lowtide pretend --prepare --torch VERSION`` makes the
environments), and is repeated on today's PyTorch. Checkouts and packages are brought into DIR where they are not there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pretend_published_rows import PACKAGES, TODAY, Run, runs
from provenance import HERE, commit

import lowtide
from lowtide.pretending.calls import run_pretended
from lowtide.pretending.environments import find
from lowtide.pretending.settings import PretendSettings, amount

RESULTS = HERE / "results" / "pretend_published.json"
# Have no build for today's CUDA or Python packages; today's take their place.
NOT_TODAY = ("bitsandbytes", "numpy", "scipy", "lightning-utilities", "torchvision")
TORCHVISION = "torchvision==0.29.1"  # of TODAY's PyTorch
_GITHUB = "https://github.com"
_SAID = "SAID "  # before a line of JSON, {name: bytes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True, help="folder for checkouts and packages")
    parser.add_argument("--again", help="a word of the name")
    parser.add_argument("--torch", help="only on this version")
    parser.add_argument("--most", type=int, help="of runs")
    args = parser.parse_args()
    known = {(line["run"], line["torch"]): line for line in _read() if line["verdict"] != "failed"}
    done = 0
    for version, run in [(run.torch, run) for run in runs()] + [(TODAY, run) for run in runs() if run.today]:
        if args.torch not in (None, version) or done == args.most:
            continue
        if (run.name, version) in known if args.again is None else args.again not in run.name:
            continue
        known[run.name, version] = line = ran(run, version, args.sources)
        done += 1
        print(
            f"{line['verdict']:<12} {line['allocated_bytes'] / 1e9:>8.3f} {line['reserved_bytes'] / 1e9:>8.3f} GB "
            f"{line['seconds']:>4} s  {version}  {run.name}",
            flush=True,
        )
        lines = {(line["run"], line["torch"]): line for line in _read()} | {(run.name, version): line}
        order = {run.name: at for at, run in enumerate(runs())}
        kept = sorted(
            (line for line in lines.values() if line["run"] in order),
            key=lambda line: (order[line["run"]], line["torch"] == TODAY),
        )
        RESULTS.write_text("[\n" + ",\n".join(json.dumps(line) for line in kept) + "\n]\n")
    return 0


def _read() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def ran(run: Run, version: str, sources: Path) -> dict[str, Any]:
    """What came of it, as one JSON object."""
    folders = [_package(sources, run.packages, wanted) for wanted in PACKAGES.get(run.packages, ())]
    if version == TODAY:
        folders = [folder for folder in folders if not folder.parent.name.startswith(NOT_TODAY)]
        folders.append(_package(sources, run.packages, TORCHVISION))
    checkout = _checkout(sources, run.checkout) if run.checkout else Path()
    words = [
        word.replace("{CHECKOUT}", str(checkout)).replace("{RECIPES}", str(HERE / "recipes")) for word in run.command
    ]
    settings = PretendSettings(
        device=run.gpu,
        memory_bytes=None if run.memory is None else amount(run.memory, "memory"),
        ranks=run.ranks,
        steps=run.steps,
        torch=version,
        no_weights=run.no_weights,
        history=False,
    )
    kept = dict(os.environ)
    os.environ.update({"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, folders)), **dict(run.variables)})
    here = os.getcwd()
    try:
        with tempfile.TemporaryFile("w+") as output:
            if run.checkout and not any("{CHECKOUT}" in word for word in run.command):
                os.chdir(checkout)
            report = run_pretended(words, settings, output)
            output.seek(0)
            written = output.read()
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(kept)
    said: dict[str, float] = {}
    for text in re.findall(rf"^{_SAID}(\{{.*\}})$", written, re.MULTILINE):
        said |= json.loads(text)
    found = report.out_of_memory
    error = "" if report.fits or found else (report.last_words.strip().splitlines() or [""])[-1]
    return {
        "run": run.name, "torch": version, "verdict": report.verdict, "gpu": report.device,
        "allocated_bytes": report.peak_allocated_bytes, "reserved_bytes": report.peak_reserved_bytes, "said": said,
        "out_of_memory": None if found is None else {
            "step": found.step, "line": _short(found.line, checkout, *folders),
            "script_line": _short(found.line, checkout, *folders),
            "asked_bytes": found.asked_bytes, "allocated_bytes": found.allocated_bytes,
            "reserved_bytes": found.reserved_bytes, "message": found.message},
        "error": error, "seconds": round(report.seconds), "commit": commit(),
        "python": str(find(version).python.parent.parent.name)[-4:], "lowtide": lowtide.__version__,
    }  # fmt: skip


def _short(line: str, *folders: Path) -> str:
    for folder in (*folders, HERE):
        line = line.removeprefix(f"{folder.resolve()}/").removeprefix(f"{folder}/")
    return line


def _checkout(sources: Path, wanted: str) -> Path:
    """A folder with a repository as of a commit."""
    repository, _, at = wanted.partition("@")
    folder = sources / wanted.replace("/", "+")
    if not folder.exists():
        subprocess.run(["git", "clone", "-q", f"{_GITHUB}/{repository}", folder], check=True)
        subprocess.run(["git", "-C", folder, "checkout", "-q", at], check=True)
    return folder


def _package(sources: Path, name: str, wanted: str) -> Path:
    """A folder for ``PYTHONPATH`` with one requirement of a set."""
    if "@" in wanted and ":" in wanted:
        checkout, _, inner = wanted.partition(":")
        return _checkout(sources, checkout) / inner
    # A folder of that name, so that a line of a package is not taken for one of the script.
    folder = sources / "packages" / re.sub(r"[^\w.=<-]", "_", wanted) / "site-packages"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), wanted]
        subprocess.run(command, check=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
