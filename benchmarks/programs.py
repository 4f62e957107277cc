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
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from provenance import provenance

from lowtide.cache_files import cache_dir

HERE = Path(__file__).parent
FILES = HERE / "program_files"
RESULTS = HERE / "results" / "programs_cpu.jsonl"
SHARE = 0.8  # of the plain run's peak
STEPS = 240  # Some seconds go by before the first plan is there.
COUNTED_STEPS = 24  # of the run that counts the plain peak
LIMIT_S = 400
_COUNTER = "from lowtide.device import allocation_counter; allocation_counter.prepare(waits=True)"


@dataclass(frozen=True)
class Run:
    """What a command is made of.

    Attributes:
        python: The interpreter.
        kind: The program's case.
        checkpointed: With the program's own checkpointing.
        steps: Forward and backward passes.
        output: Where the trained weights go.
    """

    python: str
    kind: str
    checkpointed: bool
    steps: int
    output: Path

    def module(self, name: str, *words: object) -> list[str]:
        return [self.python, "-m", name, *map(str, words)]


@dataclass(frozen=True)
class Program:
    """A program's command.

    Attributes:
        name: As its users write it.
        package: Whose version is told.
        kinds: Its cases.
        command: The command of a run, in the folder of ``tiny_model.py``.
        has_checkpointing: Whether the program has checkpointing of its own that one process can use.
        prepare: A file of ``program_files/`` that turns the model into the program's form; "": none.
        variables: Of the environment.
    """

    name: str
    package: str
    kinds: tuple[str, ...]
    command: Callable[[Run], list[str]]
    has_checkpointing: bool = True
    prepare: str = ""
    variables: tuple[tuple[str, str], ...] = ()


def _llama_factory(run: Run) -> list[str]:
    return run.module(
        "llamafactory.cli", "train", FILES / "llamafactory.yaml", f"output_dir={run.output}",
        f"finetuning_type={run.kind}", f"max_steps={run.steps}",
        f"disable_gradient_checkpointing={not run.checkpointed}",
    )  # fmt: skip


def _swift(run: Run) -> list[str]:
    return run.module(
        "swift.cli.main", "sft", FILES / "swift.yaml", "--output_dir", run.output, "--tuner_type", run.kind,
        "--max_steps", run.steps, "--save_steps", run.steps, "--gradient_checkpointing", str(run.checkpointed).lower(),
    )  # fmt: skip


def _axolotl(run: Run) -> list[str]:
    adapter = ("--adapter", "lora") if run.kind == "lora" else ()
    return run.module(
        "axolotl.cli.main", "train", FILES / "axolotl.yaml", "--launcher", "python", "--output-dir", run.output,
        "--max-steps", run.steps, *adapter, "--gradient-checkpointing", str(run.checkpointed).lower(),
    )  # fmt: skip


def _litgpt(run: Run) -> list[str]:
    return run.module(
        "litgpt", f"finetune_{run.kind}", "litgpt", "--config", FILES / "litgpt.yaml", "--out_dir", run.output,
        "--train.max_steps", run.steps,
    )  # fmt: skip


def _verl(run: Run) -> list[str]:
    settings = {
        "data.train_files": "data/messages.parquet", "data.train_batch_size": 8, "data.micro_batch_size_per_gpu": 8,
        "data.use_dynamic_bsz": False, "data.max_length": 160, "data.num_workers": 0,
        "data.ignore_input_ids_mismatch": True, "model.path": "model", "model.use_remove_padding": False,
        "+model.override_config.attn_implementation": "sdpa", "model.enable_gradient_checkpointing": run.checkpointed,
        "engine.strategy": "fsdp2", "engine.param_offload": False, "trainer.logger": "[console]",
        "trainer.total_training_steps": run.steps, "trainer.total_epochs": 1000, "trainer.device": "cpu",
        "trainer.default_local_dir": run.output, "checkpoint.save_contents": "[model]",
    }  # fmt: skip
    return run.module(
        "torch.distributed.run", "--nproc-per-node", "1", "--master-port", "29541", FILES / "verl_on_cpu.py",
        *(f"{name}={value}" for name, value in settings.items()),
    )  # fmt: skip


def _openrlhf(run: Run) -> list[str]:
    words = (
        "--model.model_name_or_path model --data.dataset data/chats.json --data.input_key instruction "
        "--data.output_key output --data.max_len 128 --train.micro_batch_size 8 --train.batch_size 8 "
        f"--train.max_epochs {run.steps // 12} --ds.zero_stage 0 --ds.param_dtype bf16 --ds.attn_implementation sdpa "
        f"--adam.lr 1e-3 --ckpt.output_dir {run.output} --logger.logging_steps 1 --eval.steps -1 --train.seed 0"
    )
    return run.module(
        "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", "29545", FILES / "openrlhf_on_cpu.py",
        *words.split(), *["--model.gradient_checkpointing_enable"] * run.checkpointed,
    )  # fmt: skip


def _script(name: str, *launcher: str) -> Callable[[Run], list[str]]:
    """A script of ``program_files/``, by a launcher's module and its words."""

    def command(run: Run) -> list[str]:
        words = [FILES / name, "--output", run.output, "--steps", run.steps]
        words += ["--checkpointing"] * run.checkpointed + ["--full"] * (run.kind == "full")
        if launcher:
            return run.module(*launcher, *words)
        return [run.python, *map(str, words)]

    return command


PROGRAMS = (
    Program("LLaMA-Factory", "llamafactory", ("full", "lora"), _llama_factory),
    Program("ms-swift", "ms_swift", ("full", "lora"), _swift),
    Program("axolotl", "axolotl", ("full", "lora"), _axolotl, variables=(("AXOLOTL_DO_NOT_TRACK", "1"),)),
    Program("litgpt", "litgpt", ("full", "lora"), _litgpt, has_checkpointing=False, prepare="litgpt_model.py"),
    Program(
        "verl", "verl", ("SFT worker, FSDP2",), _verl, prepare="verl_data.py",
        variables=(("HYDRA_FULL_ERROR", "1"),),
    ),
    Program(
        "OpenRLHF", "openrlhf", ("SFT, DeepSpeed, bf16",), _openrlhf,
        variables=(("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0")),
    ),
    Program("Composer", "mosaicml", ("all weights",), _script("composer_train.py")),
    Program("Unsloth", "unsloth", ("full", "lora"), _script("unsloth_train.py")),
    Program(
        "accelerate launch", "accelerate", ("accumulated, clipped",),
        _script("accelerate_train.py", "accelerate.commands.launch", "--cpu", "--num_processes", "1"),
    ),
    Program(
        "torchrun", "torch", ("DDP, two ranks",),
        _script("torchrun_train.py", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29533"),
    ),
    Program(
        "deepspeed", "deepspeed", ("ZeRO-2, accumulated",),
        _script("deepspeed_train.py", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", "29535"),
        variables=(("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0")),
    ),
)  # fmt: skip


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
        subprocess.run([python, "-c", _COUNTER], env=environment, check=True, capture_output=True)
        for file in [HERE / "tiny_model.py", *([FILES / program.prepare] if program.prepare else [])]:
            subprocess.run([python, file, str(folder)], env=environment, check=True, capture_output=True)

        def run(name: str, budget: str | None = None, *, checkpointed: bool = False, steps: int = steps) -> dict:
            command = program.command(Run(python, kind, checkpointed, steps, folder / name))
            if budget is not None:
                command = [python, "-m", "lowtide.cli", "run", "--json", "--budget", budget, "--", *command]
            began = time.perf_counter()
            done = subprocess.run(command, env=environment, cwd=folder, text=True, capture_output=True, timeout=LIMIT_S)
            if done.returncode:
                raise SystemExit(f"{program.name} {kind} {name}: {done.stdout[-1000:]}{done.stderr[-3000:]}")
            printed = done.stdout + done.stderr
            seconds = re.findall(r"(?:'train_runtime': '?|Training Time +: +)([\d.]+)", printed)
            status = json.loads(done.stdout.strip().splitlines()[-1]) if budget is not None else {}
            return {
                "losses": re.findall(r"(?:\{'loss': '?|loss train: |train/loss:|gpt_loss=)([\d.]+)", printed),
                "weights": _digest(folder / name),
                "seconds": float(seconds[-1]) if seconds else time.perf_counter() - began,
                "status": status.get("lowtide"), "attached_to": status.get("attached_to"),
            }  # fmt: skip

        plain = run("plain")
        own = run("own", checkpointed=True) if program.has_checkpointing else None
        counted = run("counted", "1TiB", steps=COUNTED_STEPS)["status"]["observed_peak_bytes"]
        budget = int(SHARE * counted)
        first = run("first", f"{budget}B", checkpointed=program.has_checkpointing)
        ours = run("ours", f"{budget}B", checkpointed=program.has_checkpointing)
    status = ours["status"]
    peaks = [run["status"]["highest_peak_bytes"] for run in (first, ours)]  # None: not each step was counted
    seconds = {"plain": plain["seconds"], "lowtide": ours["seconds"], "lowtide_first": first["seconds"]}
    if own is not None:
        seconds["own"] = own["seconds"]
    return {
        "program": program.name, "version": _version(program.package, packages), "case": kind, "lines_changed": 0,
        "attached_to": ours["attached_to"],
        "bitwise_losses": first["losses"] == ours["losses"] == plain["losses"] != [],
        "bitwise_weights": first["weights"] == ours["weights"] == plain["weights"] != "none",
        "own_bitwise_weights": own and own["weights"] == plain["weights"], "plain_peak_bytes": counted,
        "budget_bytes": budget, "peak_bytes": None if None in peaks else max(peaks),
        "steps": status["steps"], "planned_steps": status["planned_steps"],
        "first_planned_steps": first["status"]["planned_steps"], "plans": status["plans"],
        "over_budget_steps": max(run["status"]["over_budget_steps"] for run in (first, ours)), "seconds": seconds,
        **provenance(), "transformers": _version("transformers", packages),
    }  # fmt: skip


def _digest(folder: Path) -> str:
    """Of the weights that the program saved last."""
    files = [
        path for kind in ("*.safetensors", "lit_model.pth*", "model_world_size_*.pt") for path in folder.rglob(kind)
    ]
    files.sort(key=lambda path: (len(path.parts), path.name))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest() if files else "none"


def _version(package: str, packages: str) -> str:
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
        "found = torchtitan_training.policies(0, sys.argv[1], 0.6, 1, sys.argv[2] == 'True')\n"
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
