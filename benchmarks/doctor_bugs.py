"""The doctor on the set-ups that its checks were written for, those of ``tests/``: one JSON line each.

python benchmarks/doctor_bugs.py    a minute of one core; writes results/doctor_bugs_cpu.jsonl

A check that is silent here, or that speaks on the same set-up mended, no longer fits the versions that are installed.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

import lowtide

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "doctor_bugs_cpu.jsonl"
TESTS = HERE.parent / "tests"
# Whose code is at fault, or is used wrongly; torch where nothing is said.
LIBRARY = {
    "LT005": "transformers", "LT007": "transformers", "LT008": "transformers", "LT101": "transformers",
    "LT103": "transformers", "LT104": "transformers", "LT105": "transformers", "LT109": "deepspeed", "LT110": "trl",
    "LT202": "transformers", "LT205": "transformers", "LT206": "transformers", "LT210": "peft", "LT303": "lowtide",
    "LT304": "transformers",
}  # fmt: skip


def main() -> int:
    sys.path.insert(0, str(TESTS))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    shared, lines = provenance(), []
    for line in (*reproductions(), whole()):
        print(json.dumps(line), file=sys.stderr, flush=True)
        lines.append({"benchmark": "doctor_bugs_cpu", **line, **shared})
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return int(any(not (line["found"] and line["mended_is_silent"]) for line in lines if "code" in line))


def reproductions() -> Iterator[dict[str, Any]]:
    setups = importlib.import_module("support.sick_setups")
    compiled = {
        "LT010 Inductor": tuple(
            partial(setups.compiled_dropout, 0.1, dropout, backend="inductor") for dropout in (0.3, 0.0)
        )
    }
    for name, (sick, mended) in sorted((setups.SICK | compiled).items()):
        code = name.split()[0]
        begun = time.process_time()
        found = setups.diagnosed(sick(), code)
        yield _line(name, found, setups.diagnosed(mended(), code), time.process_time() - begun)
    ranks, training = (importlib.import_module(f"support.{n}") for n in ("ranks", "deepspeed_training"))
    begun = time.perf_counter()
    ((unread, read),) = ranks.on_every_rank(training.diagnosed, world=1)  # a process of its own
    yield _line("LT109", unread, read, time.perf_counter() - begun)


def _line(name: str, found: lowtide.Diagnosis, mended: lowtide.Diagnosis, seconds: float) -> dict[str, Any]:
    code = name.split()[0]
    library = LIBRARY.get(code, "torch")
    spoke = next((f for f in found if f.code == code), None)
    return {
        "case": name, "code": code, "library": library, "version": version(library), "found": spoke is not None,
        "severity": spoke and spoke.severity, "evidence": spoke and spoke.evidence, "gain": spoke and spoke.gain,
        "source": spoke and spoke.source, "mended_is_silent": not mended and not mended.notes, "seconds": seconds,
    }  # fmt: skip


def whole() -> dict[str, Any]:
    """Every check on a decoder of four checkpointed layers."""
    case = importlib.import_module("support.sick_setups").llama_case()
    begun = time.process_time()
    found = lowtide.diagnose(case.model, case.batch)
    return {"case": "a decoder of 4 layers", "checks": len(found.checked), "seconds": time.process_time() - begun}


if __name__ == "__main__":
    sys.exit(main())
