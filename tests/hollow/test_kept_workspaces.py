"""What products of matrices take on CUDA: kept by each thread up to PyTorch 2.14, given back from 2.15 on."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.hollow import kept_workspaces
from lowtide.hollow.devices import target_of
from lowtide.hollow.kept_workspaces import product_workspace_bytes

MIB = 1 << 20


def meta(*shape):
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    ("packet", "args", "taken"),  # as the allocator of PyTorch 2.15.0 counted them for an H100
    [
        ("aten.mm", (meta(64, 64), meta(64, 64)), 32 * MIB),
        ("aten.bmm", (meta(4, 64, 64), meta(4, 64, 64)), 32 * MIB),
        ("aten.addmm", (meta(64), meta(64, 64), meta(64, 64)), MIB),
        ("aten.addmm", (meta(1), meta(1, 1), meta(1, 1)), 32 * MIB),
        ("aten.addmm", (meta(64, 64), meta(64, 64), meta(64, 64)), 32 * MIB),
        ("aten.add", (meta(64, 64), meta(64, 64)), 0),
    ],
)
def test_a_product_that_gives_its_workspace_back_takes_that_of_its_library(packet, args, taken):
    assert product_workspace_bytes(packet, args, target_of("h100")) == taken


@pytest.mark.parametrize("release", [(2, 14), (2, 15)])
def test_a_workspace_is_resident_or_its_products(monkeypatch, release):
    monkeypatch.setattr(kept_workspaces, "torch_release", lambda: release)
    model = nn.Linear(64, 64, bias=False)

    graph = lowtide.trace(model, torch.ones(8, 64), device="h100")

    kept = release == (2, 14)
    products = [op.workspace_bytes for op in graph.ops if op.name == "aten.mm.default"]
    assert graph.resident["workspaces"] == (64 * MIB if kept else 0)
    assert set(products) == ({0} if kept else {32 * MIB})
