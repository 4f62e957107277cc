"""What kernels take beside their outputs, and the fused attention."""

import pytest
import torch
from torch.nn.functional import conv2d, scaled_dot_product_attention

from accelerator.schedules import LATE

MIB = 1 << 20
CONVOLUTION = "aten::convolution_overrideable"


def test_a_convolution_has_its_workspace_for_as_long_as_it_takes(device):
    x, weight = torch.ones(1, 1, 8, 8, device="standin"), torch.ones(1, 1, 3, 3, device="standin")
    plain = torch.accelerator.memory_allocated()
    with device.workspaces(bytes_by_op={CONVOLUTION: 5 * MIB}):
        y = conv2d(x, weight)

    assert torch.accelerator.memory_allocated() - plain == 512
    assert 5 * MIB <= torch.accelerator.max_memory_allocated() - plain <= 5 * MIB + 512
    assert y.sum() == 9 * 36


def test_a_matrix_product_keeps_its_workspace_one_for_each_stream(device):
    x = torch.ones(4, 4, device="standin")
    with device.workspaces(kept_bytes=5 * MIB):
        for count, stream in ((1, None), (1, None), (2, torch.Stream("standin"))):
            with stream or torch.accelerator.current_stream():
                x @ x
            assert torch.accelerator.memory_allocated() == 512 + count * 5 * MIB
    assert torch.accelerator.memory_allocated() == 512


def attention(device_type, **options):
    torch.manual_seed(0)
    heads = (4, 2, 2) if options.get("enable_gqa") else (4, 4, 4)
    inputs = [torch.randn(2, n, 8, 16).to(device_type).requires_grad_() for n in heads]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = scaled_dot_product_attention(*inputs, **options)
    output.sum().backward()
    return [output.detach().cpu(), *(x.grad.cpu() for x in inputs)], saved


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.zeros(8, 8)},
        {"attn_mask": torch.ones(8, 8, dtype=torch.bool).tril()},
        {"is_causal": True, "enable_gqa": True},
    ],
    ids=["plain", "causal", "mask", "boolean mask", "grouped heads"],
)
def test_fused_attention_is_that_of_the_cpu(device, options):
    theirs, _ = attention("cpu", **options)
    with device.schedule(LATE, LATE):
        ours, saved = attention(
            "standin", **{k: v.to("standin") if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        )
    assert all(map(torch.equal, theirs, ours))
    assert (2, 4, 8) in [tuple(t.shape) for t in saved]  # logsumexp: the fused one ran


def test_fused_attention_saves_inputs_output_and_logsumexp_and_no_matrix(device):
    _, fused = attention("standin")
    with device.fused_attention(False):
        _, plain = attention("standin")

    assert sorted(tuple(t.shape) for t in fused) == [(), (), *[(2, 4, 8)], *[(2, 4, 8, 16)] * 4]
    assert any(t.shape[-2:] == (8, 8) for t in plain)
