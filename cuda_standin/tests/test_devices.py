"""What the devices say of themselves, and two of them."""

import pytest

DESCRIBE = """
import torch
p = torch.cuda.get_device_properties(0)
print(p.name, p.major, p.minor, p.multi_processor_count, p.total_memory >> 20, p.shared_memory_per_block_optin >> 10,
      p.L2_cache_size >> 20, torch.cuda.is_bf16_supported(including_emulation=False), sep="|")
"""


@pytest.mark.parametrize(
    ("gpu", "says"),
    [
        ("h100", "NVIDIA H100 80GB HBM3|9|0|132|81079|227|50|True"),
        ("a100", "NVIDIA A100-SXM4-80GB|8|0|108|81153|163|40|True"),
        ("l4", "NVIDIA L4|8|9|58|22478|99|48|True"),
        ("rtx4090", "NVIDIA GeForce RTX 4090|8|9|128|24217|99|72|True"),
        ("v100", "Tesla V100-SXM2-16GB|7|0|80|16160|96|6|False"),
    ],
)
def test_a_gpu_has_the_properties_that_pytorch_decides_by(python, gpu, says):
    assert python(DESCRIBE, STANDIN_GPU=gpu) == says


def test_two_devices_have_memory_streams_and_values_of_their_own(python):
    source = """
import torch
a = torch.arange(1 << 20, device="cuda:0", dtype=torch.float32)
b = a.to("cuda:1")
with torch.cuda.device(1):
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        c = b * 2
    torch.cuda.current_stream().wait_stream(s)
    d = c + 1
print(torch.cuda.device_count(), d.device, (d.cpu() == torch.arange(1 << 20) * 2 + 1).all().item())
print(torch.cuda.max_memory_allocated(0) >> 20, torch.cuda.max_memory_allocated(1) >> 20)
free = [torch.cuda.mem_get_info(i) for i in (0, 1)]
print(*(total - left >> 20 for left, total in free))
"""
    assert python(source, STANDIN_DEVICES="2").splitlines() == ["2 cuda:1 True", "4 12", "20 40"]
    lines = python(source, STANDIN_DEVICES="2", STANDIN_LATE="all").splitlines()
    assert lines[0] == "2 cuda:1 True"
    assert lines[1].split()[0] == "4"


def test_an_l4_runs_the_code_that_was_compiled_for_the_nearest_older_gpu(python):
    """CUB has a policy for each architecture that PyTorch was compiled for, and none for 8.9."""
    source = """
import torch
table = torch.nn.Embedding(1000, 64).cuda()
table(torch.arange(8192, device="cuda") % 1000).sum().backward()
print(torch.cuda.get_device_capability(), table.weight.grad.sum().item())
"""
    assert python(source, STANDIN_GPU="l4") == f"(8, 9) {8192 * 64}.0"
