"""Public training scripts, unmodified and at full size, on a GPU that is not there (``lowtide pretend``).

python pretend_scripts.py --sources FOLDER                 what is not in the results yet
python pretend_scripts.py --sources FOLDER --only NAME     that one again
python pretend_scripts.py --brought-by                     the commands that bring sources and packages

Each case is run in a folder of its own: a copy of the script's folder with inputs made beside it. The results are
written after each case; ``table.py`` makes docs/pretend.md of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from pretend_cases import CASES, SOURCES, Case
from provenance import commit

RESULTS = Path(__file__).parent / "results" / "pretend_scripts.json"
_KEPT = ("verdict", "exit_code", "torch", "device", "capacity_bytes", "ranks", "rank", "seconds", "compile_s",
         "host_peak_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "steps", "by_kind", "out_of_memory",
         "notes")  # fmt: skip
_VERSIONS = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "diffusers",
    "deepspeed",
    "lightning",
    "bitsandbytes",
)


def main() -> int:
    arguments = _arguments()
    if arguments.brought_by:
        print("\n".join(dict.fromkeys([s.brought_by() for s in SOURCES.values() if s.commit or s.package])))
        print(f"pip install {' '.join(sorted({need for case in CASES for need in case.needs}))}")
        return 0
    known = {line["name"]: line for line in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    for case in CASES:
        if not case.command or (case.name != arguments.only if arguments.only else case.name in known):
            continue
        print(f"== {case.name}", flush=True)
        line = run_case(case, arguments.sources, arguments.keep)
        print({name: line.get(name) for name in ("verdict", "peak_allocated_bytes", "peak_reserved_bytes")}, flush=True)
        known = {line["name"]: line for line in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
        known[case.name] = line
        order = [known[c.name] for c in CASES if c.name in known]
        RESULTS.write_text(json.dumps(order, indent=1) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, default=Path("sources"), help="where the clones lie")
    parser.add_argument("--only", choices=[case.name for case in CASES if case.command], metavar="NAME")
    parser.add_argument("--keep", type=Path, help="make each case's folder here, and keep it with its output")
    parser.add_argument("--brought-by", action="store_true", help="print what brings sources and packages")
    return parser.parse_args()


def run_case(
    case: Case, sources: Path, keep: Path | None, facts: tuple[str, ...] = _KEPT
) -> dict[str, Any]:  # fmt: skip
    """The case's line of results: ``facts`` of the report."""
    with tempfile.TemporaryDirectory(prefix="pretend-") as temporary:
        above = (keep or Path(temporary)).absolute() / re.sub(r"\W+", "_", case.name)
        shutil.rmtree(above, ignore_errors=True)
        folder = above / "here"
        _made(case, sources.absolute(), folder)
        command = [sys.executable, "-m", "lowtide.cli", "pretend", "--json", "--device", case.device,
                   *shlex.split(case.options), "--", *typed(case)]  # fmt: skip
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(above / "hub"), **_variables(case)}
        with (above / "output.txt").open("w") as output:
            done = subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=output, text=True)
        (above / "report.json").write_text(done.stdout)
        output_text = (above / "output.txt").read_text(errors="replace")
    try:
        report = json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"{case.name}: lowtide pretend gave no report:\n{output_text[-2000:]}") from None
    kept: dict[str, Any] = {name: report[name] for name in facts}
    for place in (str(folder) + os.sep, str(folder), str(sources.absolute()) + os.sep, str(above)):
        kept = json.loads(json.dumps(kept).replace(json.dumps(place)[1:-1], ""))
    versions = {name: metadata.version(name) for name in _VERSIONS}
    return {"name": case.name, **kept, "versions": versions, "commit": commit()}


def _made(case: Case, sources: Path, folder: Path) -> None:
    source = SOURCES[case.source]
    if source.package:
        folder.mkdir(parents=True)
        if case.source == "TRL":
            _accelerate_configs(folder)
    else:
        origin = sources / source.folder / case.folder
        if not origin.is_dir():
            raise SystemExit(f"{origin} is not there. Bring it:\n  cd {sources} && {source.brought_by()}")
        shutil.copytree(origin, folder, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    for make in case.inputs:
        make(folder)


def _accelerate_configs(folder: Path) -> None:
    """Those of the package, where they can be typed."""
    for file in metadata.files("trl") or ():
        if file.parent.name == "accelerate_configs":
            shutil.copy(str(file.locate()), folder)


def typed(case: Case) -> list[str]:
    """The words of the command, without the variables before it."""
    words = shlex.split(case.command)
    return words[len(_variables(case)) :]


def _variables(case: Case) -> dict[str, str]:
    found = {}
    for word in shlex.split(case.command):
        name, equals, value = word.partition("=")
        if not equals or not name.isupper():
            break
        earlier = os.environ.get(name) if name == "PYTHONPATH" else None
        found[name] = value if earlier is None else os.pathsep.join([value, earlier])
    return found


if __name__ == "__main__":
    sys.exit(main())
