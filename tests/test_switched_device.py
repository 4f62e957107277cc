"""The counts of a run with another default device (tests/support/switched_device.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import not_on_the_accelerator as lists

_CONFTEST = """
import contextlib
from types import SimpleNamespace
import torch
from support import switched_device
from support.switched_device import Switched

# PyTorch knows no such device here.
switched_device.is_gpus = lambda name: False
torch.accelerator.reset_peak_memory_stats = lambda: None

kernels = []
nothing = lambda *_: contextlib.nullcontext()
device = SimpleNamespace(NAME="standin", launched=lambda: len(kernels), schedule=nothing, expandable_segments=nothing)

def pytest_configure(config):
    config.addinivalue_line("markers", "host_only(reason): why not")
    config.pluginmanager.register(Switched(device))
"""
_TESTS = """
import pytest
from conftest import kernels

def test_on_the_device(): kernels.append("add")
def test_that_fails_on_the_device(): kernels.append("add"); raise ValueError
def test_elsewhere(): pass
@pytest.mark.host_only("it is the host's")
def test_left_out(): pass
"""


def test_each_test_that_is_named_exists():
    """A list that names the folder of before a move does nothing, and says nothing."""
    tests = Path(__file__).parent
    for start in (
        *lists.MODEL_ALONE, *lists.ON_THE_CPU, *lists.LEFT_OUT, *lists.LEFT_OUT_OF_STANDIN, *lists.LEFT_OUT_OF_CUDA,
        *lists.LEFT_OUT_OF_GPUS,
    ):  # fmt: skip
        file, _, name = start.partition("::")
        assert (tests / file).exists(), start
        assert not name or name.partition("[")[0] in (tests / file).read_text(), start


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_tests_are_counted_wherever_they_ran(tmp_path, workers):
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_four.py").write_text(_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", str(workers), str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    counts = "2 tests ran on the accelerator, 1 touched no tensor of it, 1 were left out: 67% of those that touch"
    assert counts in run.stdout, run.stdout + run.stderr
