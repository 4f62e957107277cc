"""CUDA's own build of PyTorch, on a GPU or on a stand-in for one."""

import gc

import pytest
import torch
from support.gpu import is_gpus

from lowtide.device import memory
from lowtide.training import recorded_steps

NO_CUDA = "torch has no CUDA here: make test-cuda"
NEEDS_STANDIN = "needs the stand-in (cuda_standin/README.md), and this is a GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(__file__.rpartition("/")[0]):
                item.add_marker(pytest.mark.skip(reason=NO_CUDA))


@pytest.fixture(autouse=True)
def host_bound_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the host is the bound of steps as small as these depends on what else the machine does."""
    monkeypatch.setattr(recorded_steps, "why_of_host", lambda graph, costs, times: "")


@pytest.fixture
def cuda() -> torch.device:
    """The device, with nothing cached and its peak statistic at what lives now: no earlier test's is owed."""
    memory._forgotten.clear()
    memory._low.clear()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def standin(cuda: torch.device) -> None:
    """The test sets when streams run, or has a clock count for a device that is not here."""
    if is_gpus(cuda):
        pytest.skip(NEEDS_STANDIN)
