"""A look collects garbage a few times, which with transformers imported takes most of the time."""

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def _imported_modules_are_no_garbage():
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _one_process_group():
    torch.manual_seed(0)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
