"""Programs of other people at full size within a budget, on a GPU that is not there, beside their own checkpointing.

    python benchmarks/full_size_programs.py --sources FOLDER [--only NAME] [--again]

Scripts and commands are those of ``pretend_cases.py``, where the sources are named; each is run plain, with the
checkpointing that its users switch on, and within a budget by ``lowtide pretend --budget``: the peak of its own
checkpointing, or ``SHARE`` of the plain peak where it has none. Run by the Python of ``.venv-cuda``. The device has
plenty, so that the plain run ends too; it may move nothing to the host.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretend_cases import CASES
from pretend_scripts import run_case

RESULTS = Path(__file__).parent / "results" / "full_size_programs.jsonl"
SHARE = 0.8
STEPS, PLANNED_STEPS = 4, 8  # of a run without a plan, of one with
_OPTIONS = "--memory 400GiB --no-history"
_FACTS = ("verdict", "exit_code", "torch", "device", "ranks", "peak_allocated_bytes", "peak_reserved_bytes", "steps",
          "lowtide", "time", "notes")  # fmt: skip


@dataclass(frozen=True)
class Program:
    """A case of ``pretend_cases`` and its checkpointing.

    Attributes:
        name: The case's.
        own: Words that switch it on, after the command; "": there is none.
        off: Words that switch it off, where it is on by itself.
    """

    name: str
    own: str = ""
    off: str = ""


_TRL = (" --gradient_checkpointing True", " --gradient_checkpointing False")
PROGRAMS = (
    Program("nanoGPT, eager"),
    Program("imagenet"),
    Program("timm train.py", " --grad-checkpointing"),
    Program("open_clip_train.main", " --grad-checkpointing"),
    Program("train_text_to_image.py", " --gradient_checkpointing"),
    Program("sft", *_TRL),
    Program("sft, QLoRA", *_TRL),
    Program("sft, FSDP2", *_TRL),
    Program("dpo", *_TRL),
    Program("reward", *_TRL),
    Program("olora_finetuning.py"),
    Program("litgpt pretrain"),
    Program("litgpt finetune_lora"),
    Program("llamafactory-cli train"),
    Program("torchtitan"),
)
METHODS = ("plain", "own", "lowtide")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, default=Path("sources"), help="where the clones lie")
    parser.add_argument("--only", choices=[program.name for program in PROGRAMS], nargs="+", metavar="NAME")
    parser.add_argument("--again", action="store_true", help="rows that are there too")
    args = parser.parse_args()
    for program in PROGRAMS:
        if args.only and program.name not in args.only:
            continue
        known = {} if args.again else {row["method"]: row for row in read() if row["name"] == program.name}
        for method in METHODS:
            if method in known or (method == "own" and not program.own):
                continue
            budget = None
            if method == "lowtide":
                beside = known["own"]["steps"] if program.own else known["plain"]["steps"]
                peak = max(step["allocated_bytes"] for step in beside)
                budget = peak if program.own else int(SHARE * peak)
            row = measured(program, method, budget, args.sources)
            keep(row)
            if not row["steps"]:
                break
            known[method] = row
    return 0


def measured(program: Program, method: str, budget: int | None, sources: Path) -> dict[str, Any]:
    case = next(case for case in CASES if case.name == program.name)
    command = command_of(program, own=method == "own")
    steps = PLANNED_STEPS if budget else STEPS
    options = f"{case.options} {_OPTIONS} --steps {steps}"
    if budget:
        options += f" --budget {budget} --host-budget 0"
    found = run_case(replace(case, command=command, options=options), sources, None, _FACTS)
    row = {**found, "method": method, "budget_bytes": budget}
    peaks = " ".join(f"{step['allocated_bytes'] / 2**30:.2f}" for step in row["steps"])
    print(f"{program.name}, {method}: {row['verdict']}; steps {peaks} GiB; {row['lowtide']}", flush=True)
    return row


def command_of(program: Program, *, own: bool) -> str:
    """The case's, with its own checkpointing or without, whichever it is typed with."""
    command = next(case.command for case in CASES if case.name == program.name)
    if program.own:
        command = command.replace(" --gradient_checkpointing ", " ")
    return command + (program.own if own else program.off)


def read() -> list[dict[str, Any]]:
    if not RESULTS.exists():
        return []
    names = [program.name for program in PROGRAMS]
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return [row for row in rows if row["name"] in names]


def keep(row: dict[str, Any]) -> None:
    """In place of the row that had its name and method."""
    names = [program.name for program in PROGRAMS]
    rows = [known for known in read() if (known["name"], known["method"]) != (row["name"], row["method"])]
    rows = sorted([*rows, row], key=lambda line: (names.index(line["name"]), METHODS.index(line["method"])))
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in rows))


if __name__ == "__main__":
    sys.exit(main())
