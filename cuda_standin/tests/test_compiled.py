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


def test_values_of_compiled_graphs_need_a_second_device(python):
    error = python("from cuda_standin import compiled_values; compiled_values.install()", fails=True)
    assert error.splitlines()[-1].endswith(
        "values of compiled graphs are made on a second device: set STANDIN_DEVICES=2."
    )
