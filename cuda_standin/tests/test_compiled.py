"""``torch.compile``: Triton compiles kernels for the device; with a second device graphs have values."""

import pytest

SOURCE = """
import sys, torch, cuda_standin
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)).cuda()
x = torch.randn(32, 64, device="cuda")
plain = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
if torch.cuda.device_count() > 1:
    from cuda_standin import compiled_values
    compiled_values.install()
launches = cuda_standin.counters().launches
loss = torch.compile(model)(x).square().mean()
made = torch.autograd.grad(loss, list(model.parameters()))
print(cuda_standin.counters().launches > launches, all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain, made)))
"""


@pytest.mark.slow
def test_compiled_graphs_have_values_where_a_second_device_makes_them(python, tmp_path):
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    assert python(SOURCE, STANDIN_DEVICES="2", **caches) == "True True"
    assert python(SOURCE, **caches) == "True False"  # kernels do nothing


EXPANDED = """
import torch
from cuda_standin import compiled_values
compiled_values.install()
x, y = torch.randn(2, 8, device="cuda"), torch.randn(8, device="cuda").expand(4, 8)
made = torch.compile(lambda x, y: (x.sum(0).expand(4, 8), y + 1))(x, y)
print(made[0].stride() == (0, 1), torch.allclose(made[0], x.sum(0).expand(4, 8)), torch.equal(made[1], y + 1))
"""


@pytest.mark.slow
def test_expanded_tensors_have_values_too(python, tmp_path):
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    assert python(EXPANDED, STANDIN_DEVICES="2", **caches) == "True True True"


def test_values_of_compiled_graphs_need_a_second_device(python):
    error = python("from cuda_standin import compiled_values; compiled_values.install()", fails=True)
    assert error.splitlines()[-1].endswith(
        "values of compiled graphs are made on a second device: set STANDIN_DEVICES=2."
    )
