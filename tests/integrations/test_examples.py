"""The scripts in ``examples/`` run, and end with what was gained."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


QUICK = {"plain_loop"}


@pytest.mark.parametrize(
    "script",
    [pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else [pytest.mark.thorough]) for path in EXAMPLES],
)
def test_an_example_ends_with_a_lower_peak(script, tmp_path):
    # A folder of its own: what a killed run of DeepSpeed leaves in the usual one makes the next wait for ever.
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path), "LOWTIDE_CACHE_DIR": str(tmp_path / "plans")}
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=400, cwd=tmp_path, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = re.fullmatch(r"peak ([\d.]+) MiB -> ([\d.]+) MiB, .+", ran.stdout.splitlines()[-1])
    assert found is not None, ran.stdout[-2000:]
    assert float(found[2]) < 0.95 * float(found[1])
    assert not re.search(r"\b0 of \d+ steps ran under a plan", ran.stdout + ran.stderr)
