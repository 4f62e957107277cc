"""These tests need PyTorch's CUDA build on the stand-in: ``make test-cuda``. Elsewhere each is skipped by that name."""

import importlib.util
import os
import subprocess
import sys

import pytest

collect_ignore_glob = []


def _loaded() -> bool:
    if importlib.util.find_spec("cuda_standin") is None:
        return False
    import torch  # noqa: F401

    import cuda_standin

    return cuda_standin.is_loaded()


LOADED = _loaded()


def pytest_collection_modifyitems(items):
    if LOADED:
        return
    for item in items:
        item.add_marker(pytest.mark.skip(reason="PyTorch's CUDA build on the stand-in is not here: make test-cuda"))


@pytest.fixture
def python():
    """Runs Python source in a process of its own; returns what it printed. A variable that is None is taken out."""

    def run(source, fails=False, **variables):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("STANDIN_")}
        environment |= {name: value for name, value in variables.items() if value is not None}
        done = subprocess.run([sys.executable, "-c", source], env=environment, text=True, capture_output=True)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stderr.strip() if fails else done.stdout.strip()

    return run
