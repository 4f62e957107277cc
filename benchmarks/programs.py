"""Programs whose code stays as it is, under ``lowtide run``, beside their own checkpointing: one JSON line a case.

    python benchmarks/programs.py --packages LLaMA-Factory=FOLDER ms-swift=FOLDER torchtitan=FOLDER

A program's packages may lie in a folder of their own, which then comes first on ``PYTHONPATH``; ``--python`` names
another interpreter for it. Each case is a random Llama (``tiny_model.py``) trained by the program's own command with a
file of ``program_files/`` as its users write it: without checkpointing, with the program's own, and twice within a
budget, from the same seed. The second run within the budget finds its plans in the cache. torchtitan's cases are its
real Trainer on gloo (``tests/support/torchtitan_on_cpu.py``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import distributions
from itertools import groupby
from pathlib import Path

from program_cases import FILES, PROGRAMS, Program, Run
from provenance import provenance

from lowtide.cache_files import cache_dir

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "programs_cpu.jsonl"
SHARE = 0.8  # of the plain run's peak
STEPS = 240  # Some seconds go by before the first plan is there.
COUNTED_STEPS = 24  # of the run that counts the plain peak
LIMIT_S = 400
_LOSS = r"(?:\{'loss': '?|loss train: |train/loss:|gpt_loss=|iter \d+: loss )(-?[\d.e-]+|nan)"
_COUNTER = (
    "import torch; from lowtide.device import allocation_counter; allocation_counter.prepare(waits=True); "
    "print(torch.__version__)"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="*", default=[], metavar="PROGRAM=FOLDER[:FOLDER]")
    parser.add_argument("--python", nargs="*", default=[], metavar="PROGRAM=INTERPRETER")
    parser.add_argument("--kinds", nargs="*", help="of each program; default all")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    folders = dict(pair.split("=", 1) for pair in args.packages)
    interpreters = dict(pair.split("=", 1) for pair in args.python)
    for program in PROGRAMS:
        if program.name in folders:
            for kind in args.kinds or program.kinds:
                python = interpreters.get(program.name, sys.executable)
                found = _case(program, kind, folders[program.name], python, args.steps)
                _write(found)
    if "torchtitan" in folders:
        for kind in args.kinds or ("as it is", "compiled"):
            found = _torchtitan(folders["torchtitan"], compiled=kind == "compiled")
            _write(found)
    return 0


def _write(found: dict) -> None:
    """In the place of the case's line."""
    print(json.dumps(found), flush=True)
    lines = [json.loads(text) for text in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    kept = [line for line in lines if (line["program"], line["case"]) != (found["program"], found["case"])]
    every = sorted([*kept, found], key=lambda line: (line["program"], line["case"]))
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in every))


def _environment(packages: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LOWTIDE_")}
    path = os.pathsep.join(filter(None, [str(HERE.parent / "src"), packages, os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1"}


def _case(program: Program, kind: str, packages: str, python: str, steps: int) -> dict:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        environment = _environment(packages) | {"LOWTIDE_CACHE_DIR": str(folder / "plans")} | dict(program.variables)
        environment["LOWTIDE_ALLOCATION_COUNTER"] = str(cache_dir() / "counter")  # from the first step on
        environment["LOWTIDE_PLANNED_OPS"] = str(cache_dir() / "planned_ops")
        built = subprocess.run([python, "-c", _COUNTER], env=environment, check=True, capture_output=True, text=True)
        for file in [HERE / "tiny_model.py", *([FILES / program.prepare] if program.prepare else [])]:
            subprocess.run([python, file, str(folder)], env=environment, check=True, capture_output=True)

        def run(name: str, budget: str | None = None, *, checkpointed: bool = False, steps: int = steps) -> dict:
            command = program.command(Run(python, kind, checkpointed, steps, folder / name))
            if budget is not None:
                command = [python, "-m", "lowtide.cli", "run", "--json", "--budget", budget, "--", *command]
            printed, between_losses = _watched(command, environment, folder)
            seconds = re.findall(r"(?:'train_runtime': '?|Training Time +: +)([\d.]+)", printed)
            status = json.loads(printed[printed.rindex('{"status": ') :].splitlines()[0]) if budget is not None else {}
            return {
                "losses": [value for value, _ in groupby(re.findall(_LOSS, printed))],  # a bar shows one several times
                "weights": _digest(folder / name),
                "seconds": float(seconds[-1]) if seconds else between_losses,
                "status": status.get("lowtide"), "attached_to": status.get("attached_to"),
            }  # fmt: skip

        plain = run("plain")
        own = run("own", checkpointed=True) if program.has_checkpointing else None
        counted = run("counted", "1TiB", steps=COUNTED_STEPS)["status"]["observed_peak_bytes"]
        budget = int(SHARE * counted)
        first = run("first", f"{budget}B", checkpointed=program.has_checkpointing)
        ours = run("ours", f"{budget}B", checkpointed=program.has_checkpointing)
        same = first["weights"] == ours["weights"] == plain["weights"]
        repeats = None if same else run("plain again")["weights"] == plain["weights"]  # some draw from no seed
    status = ours["status"]
    peaks = [run["status"]["highest_peak_bytes"] for run in (first, ours)]  # None: not each step was counted
    seconds = {"plain": plain["seconds"], "lowtide": ours["seconds"], "lowtide_first": first["seconds"]}
    if own is not None:
        seconds["own"] = own["seconds"]
    return {
        "program": program.name, "version": _version(program.package, packages), "case": kind, "lines_changed": 0,
        "attached_to": ours["attached_to"],
        "bitwise_losses": first["losses"] == ours["losses"] == plain["losses"] != [],
        "bitwise_weights": same and plain["weights"] != "none", "plain_repeats": repeats,
        "own_bitwise_weights": own and own["weights"] == plain["weights"], "plain_peak_bytes": counted,
        "budget_bytes": budget, "peak_bytes": None if None in peaks else max(peaks),
        "steps": status["steps"], "planned_steps": status["planned_steps"],
        "first_planned_steps": first["status"]["planned_steps"], "plans": status["plans"],
        "over_budget_steps": max(run["status"]["over_budget_steps"] for run in (first, ours)), "seconds": seconds,
        "why_not": status["why_not"], "reasons": status["reasons"],
        **provenance(), "torch": built.stdout.strip(), "transformers": _version("transformers", packages),
    }  # fmt: skip


def _watched(command: list[str], environment: dict[str, str], folder: Path) -> tuple[str, float]:
    """What it prints, and the seconds from its first loss to its last."""
    first = last = 0.0
    printed: list[str] = []
    with subprocess.Popen(
        command, env={**environment, "PYTHONUNBUFFERED": "1"}, cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        ends = threading.Timer(LIMIT_S, process.kill)
        ends.start()
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line.decode(errors="replace"))
            if re.search(_LOSS, printed[-1]):
                last = time.perf_counter()
                first = first or last
        ends.cancel()
    text = "".join(printed)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: {text[-4000:]}")
    return text, last - first


def _digest(folder: Path) -> str:
    """Of the weights that the program saved last."""
    files = [
        path for kind in ("*.safetensors", "lit_model.pth*", "model_world_size_*.pt") for path in folder.rglob(kind)
    ]
    files.sort(key=lambda path: (len(path.parts), path.name))
    if kept := next(folder.glob("ckpt.pt"), None):  # nanoGPT's, which has its settings in it
        import torch

        state = torch.load(kept, weights_only=True)["model"]
        return hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest() if files else "none"


def _version(package: str, packages: str) -> str:
    if not package:  # a clone
        done = subprocess.run(["git", "-C", packages, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        return done.stdout.strip()
    for found in distributions(path=[*packages.split(os.pathsep), *sys.path]):
        if found.metadata["Name"].lower().replace("-", "_") == package:
            return found.version
    return "?"


def _torchtitan(packages: str, *, compiled: bool) -> dict:
    source = (
        "import json, os, sys, torch\n"
        "torch.set_num_threads(1)\n"
        "torch.distributed.init_process_group('gloo', init_method='tcp://127.0.0.1:29519', rank=0, world_size=1)\n"
        "from support import torchtitan_training\n"
        "share = 0.7 if sys.argv[2] == 'True' else 0.6\n"  # below, no variant of a compiled block is small enough
        "found = torchtitan_training.policies(0, sys.argv[1], share, 1, sys.argv[2] == 'True', 16)\n"
        "plain = found['none']\n"
        "for run in found.values():\n"
        "    run['same'] = (run['losses'], run['weights']) == (plain['losses'], plain['weights'])\n"
        "    run['status'] = run['status'] and run['status'].to_dict()\n"
        "for run in found.values():\n"
        "    del run['weights']\n"
        "print('FOUND ' + json.dumps(found))\n"
    )
    environment = _environment(packages)
    environment["PYTHONPATH"] += os.pathsep + str(HERE.parent / "tests") + os.pathsep + str(HERE)
    with tempfile.TemporaryDirectory() as folder:
        environment["LOWTIDE_CACHE_DIR"] = folder
        done = subprocess.run(
            [sys.executable, "-c", source, folder, str(compiled)],
            env=environment,
            text=True,
            capture_output=True,
            timeout=LIMIT_S,
        )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found = json.loads(done.stdout.split("FOUND ")[1])
    ours, status = found["lowtide"], found["lowtide"]["status"]
    last = {name: run["peaks"][-1] for name, run in found.items()}
    return {
        "program": "torchtitan", "version": _version("torchtitan", packages),
        "case": "Llama 3, FSDP2, gloo" + ", compiled" * compiled,
        "lines_changed": 1, "bitwise_losses": ours["same"], "bitwise_weights": ours["same"],
        "own_bitwise_weights": found["full"]["same"], "plain_peak_bytes": max(found["none"]["peaks"]),
        "budget_bytes": ours["budget"], "peak_bytes": max(ours["peaks"]), "steps": status["steps"],
        "planned_steps": status["planned_steps"], "over_budget_steps": status["over_budget_steps"],
        "why_not": status["why_not"], "reasons": status["reasons"],
        "own_peak_bytes": last["full"], "selective_peak_bytes": last["selective"],
        "memory_budget_peak_bytes": last.get("memory budget"),
        "seconds": {
            "plain": found["none"]["seconds"], "own": found["full"]["seconds"], "lowtide": ours["seconds"],
            **{name: found[name]["seconds"] for name in ("selective", "memory budget") if name in found},
        },
        **provenance(),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
