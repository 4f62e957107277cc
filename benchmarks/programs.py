"""Programs whose code stays as it is, under ``lowtide run``, beside their own checkpointing: one JSON line a case.

    python benchmarks/programs.py --packages LLaMA-Factory=FOLDER ms-swift=FOLDER torchtitan=FOLDER

A program's packages may lie in a folder of their own, which then comes first on ``PYTHONPATH``. Each case is a random
Llama (``tiny_model.py``) trained by the program's own command for 12 steps of the optimizer: without checkpointing,
with the program's own, and within a budget, from the same seed. The run within the budget is the second one, which
finds its plans in the cache. torchtitan's cases are its real Trainer on gloo (``tests/support/torchtitan_on_cpu.py``).
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
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from provenance import provenance

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "programs_cpu.jsonl"
SHARE = 0.8  # of the plain run's peak
STEPS = 12
LIMIT_S = 400


@dataclass(frozen=True)
class Program:
    """``command(folder, output, kind, checkpointed)``; ``package``: whose version is told."""

    name: str
    package: str
    command: Callable[[Path, Path, str, bool], list[str]]


def _llama_factory(folder: Path, output: Path, kind: str, checkpointed: bool) -> list[str]:
    settings = {
        "model_name_or_path": folder / "model", "stage": "sft", "do_train": True, "finetuning_type": kind,
        "dataset": "chats", "dataset_dir": folder / "data", "template": "llama2", "cutoff_len": 128,
        "output_dir": output, "overwrite_output_dir": True, "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1, "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "learning_rate": 1e-3, "seed": 0, "lora_rank": 8,
        "disable_gradient_checkpointing": not checkpointed, "overwrite_cache": True, "disable_tqdm": True,
    }  # fmt: skip
    file = output.with_suffix(".yaml")
    file.write_text("".join(f"{name}: {json.dumps(value, default=str)}\n" for name, value in settings.items()))
    return [sys.executable, "-m", "llamafactory.cli", "train", str(file)]


def _swift(folder: Path, output: Path, kind: str, checkpointed: bool) -> list[str]:
    words = (
        f"--model {folder / 'model'} --model_type llama --template chatml --dataset {folder / 'data/messages.jsonl'} "
        f"--output_dir {output} --add_version false --max_steps {STEPS} --per_device_train_batch_size 8 "
        f"--gradient_accumulation_steps 1 --logging_steps 1 --save_strategy steps --save_steps {STEPS} "
        "--eval_strategy no --split_dataset_ratio 0 --report_to none --torch_dtype float32 --max_length 128 "
        "--use_cpu true --learning_rate 1e-3 --attn_impl sdpa --seed 0 --data_seed 0 --dataloader_num_workers 0 "
        f"--tuner_type {kind} --gradient_checkpointing {str(checkpointed).lower()} --save_only_model true"
    )
    return [sys.executable, "-m", "swift.cli.sft", *words.split()]


PROGRAMS = (Program("LLaMA-Factory", "llamafactory", _llama_factory), Program("ms-swift", "ms_swift", _swift))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="*", default=[], metavar="PROGRAM=FOLDER[:FOLDER]")
    args = parser.parse_args()
    folders = dict(pair.split("=", 1) for pair in args.packages)
    for program in PROGRAMS:
        if program.name in folders:
            for kind in ("full", "lora"):
                found = _case(program, kind, folders[program.name])
                _write(found)
    if "torchtitan" in folders:
        found = _torchtitan(folders["torchtitan"])
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


def _case(program: Program, kind: str, packages: str) -> dict:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        environment = _environment(packages) | {"LOWTIDE_CACHE_DIR": str(folder / "plans")}
        subprocess.run(
            [sys.executable, HERE / "tiny_model.py", str(folder)], env=environment, check=True, capture_output=True
        )

        def run(name: str, budget: str | None, checkpointed: bool) -> dict:
            command = program.command(folder, folder / name, kind, checkpointed)
            if budget is not None:
                command = [sys.executable, "-m", "lowtide.cli", "run", "--json", "--budget", budget, "--", *command]
            began = time.perf_counter()
            done = subprocess.run(command, env=environment, cwd=folder, text=True, capture_output=True, timeout=LIMIT_S)
            if done.returncode:
                raise SystemExit(f"{program.name} {kind} {name}: {done.stderr[-3000:]}")
            printed = done.stdout + done.stderr
            seconds = re.findall(r"'train_runtime': '?([\d.]+)", printed)
            status = json.loads(done.stdout.strip().splitlines()[-1])["lowtide"] if budget is not None else None
            return {
                "losses": re.findall(r"\{'loss': '?([\d.]+)", printed), "weights": _digest(folder / name),
                "seconds": float(seconds[-1]) if seconds else time.perf_counter() - began, "status": status,
            }  # fmt: skip

        plain = run("plain", None, checkpointed=False)
        own = run("own", None, checkpointed=True)
        counted = run("counted", "1TiB", checkpointed=False)["status"]["observed_peak_bytes"]
        budget = int(SHARE * counted)
        run("first", f"{budget}B", checkpointed=True)
        ours = run("ours", f"{budget}B", checkpointed=True)
    status = ours["status"]
    return {
        "program": program.name, "version": _version(program.package, packages), "case": kind, "lines_changed": 0,
        "bitwise_losses": ours["losses"] == plain["losses"] != [],
        "bitwise_weights": ours["weights"] == plain["weights"] != "none",
        "own_bitwise_weights": own["weights"] == plain["weights"], "plain_peak_bytes": counted,
        "budget_bytes": budget, "peak_bytes": status["observed_peak_bytes"], "steps": status["steps"],
        "planned_steps": status["planned_steps"], "over_budget_steps": status["over_budget_steps"],
        "seconds": {"plain": plain["seconds"], "own": own["seconds"], "lowtide": ours["seconds"]}, **provenance(),
    }  # fmt: skip


def _digest(folder: Path) -> str:
    """Of the weights that the program saved last."""
    files = sorted(folder.rglob("*.safetensors"), key=lambda path: (len(path.parts), path.name))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest() if files else "none"


def _version(package: str, packages: str) -> str:
    for found in distributions(path=packages.split(os.pathsep)):
        if found.metadata["Name"].lower().replace("-", "_") == package:
            return found.version
    return "?"


def _torchtitan(packages: str) -> dict:
    source = (
        "import json, os, sys, torch\n"
        "torch.set_num_threads(1)\n"
        "torch.distributed.init_process_group('gloo', init_method='tcp://127.0.0.1:29519', rank=0, world_size=1)\n"
        "from support import torchtitan_training\n"
        "found = torchtitan_training.policies(0, sys.argv[1], 0.6, 1)\n"
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
            [sys.executable, "-c", source, folder], env=environment, text=True, capture_output=True, timeout=LIMIT_S
        )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found = json.loads(done.stdout.split("FOUND ")[1])
    ours, status = found["lowtide"], found["lowtide"]["status"]
    last = {name: run["peaks"][-1] for name, run in found.items()}
    return {
        "program": "torchtitan", "version": _version("torchtitan", packages), "case": "Llama 3, FSDP2, gloo",
        "lines_changed": 1, "bitwise_losses": ours["same"], "bitwise_weights": ours["same"],
        "own_bitwise_weights": found["full"]["same"], "plain_peak_bytes": max(found["none"]["peaks"]),
        "budget_bytes": ours["budget"], "peak_bytes": max(ours["peaks"]), "steps": status["steps"],
        "planned_steps": status["planned_steps"], "over_budget_steps": status["over_budget_steps"],
        "own_peak_bytes": last["full"], "selective_peak_bytes": last["selective"],
        "seconds": {
            "plain": found["none"]["seconds"], "own": found["full"]["seconds"], "lowtide": ours["seconds"],
            "selective": found["selective"]["seconds"],
        },
        **provenance(),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
