"""What the accelerator's own tests share."""

import gc
import sys
import time

import pytest
import torch

from lowtide.training import recorded_steps


@pytest.fixture(autouse=True)
def host_bound_is_not_told(monkeypatch):
    """Whether the host is the bound of steps as small as these depends on what else the machine does."""
    monkeypatch.setattr(recorded_steps, "why_of_host", lambda graph, costs, times: "")


@pytest.fixture
def device(accelerator):
    """The device module, with no memory reserved and nothing to count yet."""
    accelerator.module.manual_seed_all(0)
    sys.last_value = sys.last_traceback = None  # of a test that failed: they hold its tensors
    for _ in range(20):  # a thread that hands in a plan may hold the last test's fit for a moment
        gc.collect()
        for index in range(2):
            torch.accelerator.synchronize(index)
        torch.accelerator.empty_cache()
        if not any(map(torch.accelerator.memory_reserved, range(2))):
            break
        time.sleep(0.1)
    assert torch.accelerator.memory_reserved(0) == torch.accelerator.memory_reserved(1) == 0
    for index in range(2):
        torch.accelerator.reset_peak_memory_stats(index)
        torch.accelerator.reset_accumulated_memory_stats(index)
    return accelerator
