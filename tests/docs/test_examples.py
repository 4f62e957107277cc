"""The examples run as they are, and gain what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_ends_with_a_lower_peak(example):
    ran = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    plain, ours = map(int, re.findall(r"(\d+) MiB", ran.stdout.splitlines()[-1]))
    assert 0 < ours <= 0.7 * plain
