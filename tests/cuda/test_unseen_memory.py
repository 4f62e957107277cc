"""What tests write past the dispatcher arrives, on a GPU too, where the host writes into a copy of the memory."""

import numpy as np
import pytest
import torch
from support import opaque_functions, unseen_memory
from support.unseen_memory import memory_of


@pytest.fixture(autouse=True, params=[True, False], ids=["copies", "in place"])
def way(request, monkeypatch, cuda):
    if not request.param and not unseen_memory.is_within_reach(torch.empty(1, device=cuda)):
        pytest.skip("the host cannot reach a GPU's memory")
    if request.param:
        for module in (unseen_memory, opaque_functions):
            monkeypatch.setattr(module, "is_within_reach", lambda tensor: tensor.is_cpu)


def test_what_is_assigned_arrives_and_no_version_counts_it(cuda):
    x = torch.arange(12.0, device=cuda).view(3, 4).t()
    version = x._version

    memory_of(x)[0, 1] = -1
    memory_of(x)[2] += 100
    memory_of(x).reshape(4, 3)[3][...] = np.float32(7)
    memory_of(x)[:] = memory_of(x)[::-1].copy()

    expected = torch.tensor([[7.0, 7, 7], [102, 106, 110], [1, 5, 9], [0, -1, 8]])
    assert torch.equal(x.cpu(), expected) and x._version == version


def test_what_is_read_or_computed_is_an_array_of_its_own(cuda):
    x = torch.ones(4, device=cuda)
    twice = memory_of(x) * 2
    twice[:] = 5
    assert torch.equal(x.cpu(), torch.ones(4))


def test_kernels_read_and_write_tensors(cuda):
    a, b = torch.randn(2, 64).unbind()
    made = torch.empty(64, device=cuda)
    opaque_functions.launch("swiglu", a.to(cuda), b.to(cuda), made, 64)
    torch.testing.assert_close(made.cpu(), torch.nn.functional.silu(a) * b)
