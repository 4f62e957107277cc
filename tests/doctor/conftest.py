"""What every test of the doctor leaves behind."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_process_group():
    torch.manual_seed(0)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
