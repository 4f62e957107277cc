"""The scripts in ``examples/`` run, and end with what was gained."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_ends_with_a_lower_peak(script, tmp_path):
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = re.fullmatch(r"peak ([\d.]+) MiB -> ([\d.]+) MiB, .* in both", ran.stdout.splitlines()[-1])
    assert float(found[2]) < float(found[1])
