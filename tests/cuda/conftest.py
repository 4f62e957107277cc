"""Tests that need PyTorch's CUDA build and a device, be it the stand-in (``make test-cuda``)."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    why = f"PyTorch {torch.__version__} finds no CUDA device. Run: make test-cuda"
    for item in items:
        if "cuda" in item.path.parent.parts and item.path.parent.parent.name == "tests":
            item.add_marker(pytest.mark.skip(reason=why))
