"""When the stand-in is loaded, and when it refuses to be."""

import pytest
from cuda_standin.settings import StandinError

from cuda_standin import loading

SEES = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.get_device_name())"


def test_an_environment_that_has_it_sees_one_h100(python):
    assert python(SEES) == "True 1 NVIDIA H100 80GB HBM3"


def test_without_devices_it_is_a_cuda_build_on_a_machine_without_a_gpu(python):
    source = """
import torch
print(torch.cuda.is_available(), torch.cuda.device_count(), torch.accelerator.is_available())
x = torch.ones(3, requires_grad=True)
(x * 2).sum().backward()
print(x.grad.tolist())
try:
    x.cuda()
except RuntimeError as error:
    print(error)
"""
    assert python(source, STANDIN_DEVICES="0").splitlines() == [
        "False 0 False", "[2.0, 2.0, 2.0]", "No CUDA GPUs are available"
    ]  # fmt: skip


def test_a_process_that_does_not_import_torch_pays_for_three_small_modules(python):
    source = "import sys; print(*sorted(name for name in sys.modules if name.startswith('cuda_standin')))"
    assert python(source) == "cuda_standin cuda_standin.autoload cuda_standin.imports"


def test_another_finder_that_asks_all_others_first_is_no_circle(python):
    source = """
import sys
class Other:
    def find_spec(self, name, path=None, target=None):
        others = (finder for finder in sys.meta_path if finder is not self)
        return next((spec for other in others if (spec := other.find_spec(name, path, target)) is not None), None)
sys.meta_path.insert(0, Other())
"""
    assert python(source + SEES) == "True 1 NVIDIA H100 80GB HBM3"


def test_a_variable_without_meaning_ends_the_import_with_one_sentence(python):
    error = python("import torch", fails=True, STANDIN_GPU="h101")
    assert error.splitlines()[-1].endswith("rtx4090, 3090, 4090.") or "no such GPU; there are h100, " in error


def test_two_runtimes_in_one_process_are_refused(python):
    error = python(f"import ctypes; ctypes.CDLL({str(loading.folder / _runtime())!r}); import torch", fails=True)
    assert "is loaded in this process already, and two CUDA runtimes do not go together" in error


def test_beside_a_real_gpu_it_stays_away_unless_asked(monkeypatch, tmp_path):
    driver = tmp_path / "nvidiactl"
    driver.touch()
    monkeypatch.setattr(loading, "_REAL_DRIVER", driver)
    monkeypatch.setattr(loading, "_loaded_runtimes", list)
    with pytest.raises(StandinError, match="this machine has a real NVIDIA GPU .*, which the stand-in would hide"):
        loading._refuse_what_is_there()
    monkeypatch.setenv("STANDIN_CUDA", "1")
    loading._refuse_what_is_there()
    monkeypatch.delenv("STANDIN_CUDA")
    driver.unlink()
    loading._refuse_what_is_there()


def _runtime():
    return (loading.folder / "order.txt").read_text().split()[0]


def test_a_process_that_ends_right_after_backward_ends_well(python):
    source = """
import torch
torch.nn.Linear(64, 64).cuda()(torch.ones(4, 64, device="cuda")).sum().backward()
"""
    for _ in range(4):  # without the wait, every second of them was aborted
        assert python(source) == ""
