"""A look collects garbage a few times, which with transformers imported takes most of the time."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _imported_modules_are_no_garbage():
    gc.freeze()
    yield
    gc.unfreeze()
