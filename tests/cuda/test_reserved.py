"""Trainings of a fresh process reserve what a trace without memory foresaw."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_training_reserves_what_was_foreseen(kind):
    """Plain and under a plan, with segments of fixed size and with expandable ones."""
    command = [sys.executable, "reserved_cuda.py", "--only", kind, "--variants", "float32", "--rows", "32"]
    ran = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False)

    assert ran.stdout.splitlines()[-1:] == ["4 of 4 exact; lowest +0 MiB"], ran.stdout + ran.stderr
