"""The numbers on the device are the CPU's."""

import itertools
import math

import pytest

import cuda_standin

torch = pytest.importorskip("torch")
F = torch.nn.functional


def test_a_model_in_float32_has_the_cpus_bits():
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(4, 10, 32)
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    model.cuda()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        made = torch.autograd.grad(model(x.cuda()).square().mean(), list(model.parameters()))
    for a, b in zip(expected, made):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-5, atol=1e-6)
    assert not cuda_standin.report().without_values


KERNELS = {
    "flash": torch.nn.attention.SDPBackend.FLASH_ATTENTION,
    "efficient": torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION,
}


@pytest.mark.parametrize(
    ("kernel", "dtype", "causal", "kv_heads"),
    [
        (k, d, c, h)
        for k, d, c, h in itertools.product(KERNELS, [torch.float32, torch.bfloat16], [False, True], [4, 2])
        if not (k == "flash" and d == torch.float32)
    ],
    ids=str,
)
def test_attention_and_its_gradients_are_those_of_its_definition(kernel, dtype, causal, kv_heads):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 9, 16, dtype=dtype)
    k, v = torch.randn(2, 2, kv_heads, 9, 16, dtype=dtype).unbind()
    grad = torch.randn(2, 4, 9, 16, dtype=dtype)

    def run(attention, device, wide):
        leaves = [t.clone().to(device, torch.float32 if wide else dtype).requires_grad_() for t in (q, k, v)]
        out = attention(*leaves)
        out.backward(grad.to(device, out.dtype))
        return [out, *(t.grad for t in leaves)]

    def definition(q, k, v):
        k, v = (t.repeat_interleave(4 // kv_heads, 1) for t in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(16)
        if causal:
            scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
        return scores.softmax(3) @ v

    expected = run(definition, "cpu", wide=True)
    with torch.nn.attention.sdpa_kernel(KERNELS[kernel]):
        made = run(
            lambda *a: F.scaled_dot_product_attention(*a, is_causal=causal, enable_gqa=kv_heads < 4), "cuda", wide=False
        )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(expected, made):
        torch.testing.assert_close(b.cpu().float(), a, rtol=tolerance, atol=tolerance)


def test_draws_are_a_function_of_the_generators_state():
    x = torch.ones(1000, device="cuda")
    torch.cuda.manual_seed(1)
    state = torch.cuda.get_rng_state()
    first, second = F.dropout(x, 0.5), F.dropout(x, 0.5)
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, F.dropout(x, 0.5))
    assert 400 < (first > 0).sum().item() < 600
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randn(5, device="cuda"), _after(state, lambda: torch.randn(5, device="cuda")))


def _after(state, draw):
    torch.cuda.set_rng_state(state)
    return draw()


def test_dropout_in_attention_is_the_same_forward_and_backward():
    torch.cuda.manual_seed(0)
    q = torch.randn(1, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
    v = torch.eye(8, 16, device="cuda", dtype=torch.bfloat16).expand(1, 2, 8, 16).clone().requires_grad_()
    with torch.nn.attention.sdpa_kernel(KERNELS["flash"]):
        out = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
    weights = out.detach()[..., :8]  # of each query, since the values are unit vectors
    out.sum().backward()
    torch.testing.assert_close(v.grad[..., 0].float(), weights.float().sum(2), rtol=3e-2, atol=3e-2)
    assert (weights == 0).float().mean().item() > 0.2


def test_an_operator_that_has_no_values_raises_or_is_told(python):
    source = """
import torch, cuda_standin
offsets = torch.tensor([0, 4, 8], dtype=torch.int32, device="cuda")
q = torch.randn(8, 2, 16, device="cuda", dtype=torch.bfloat16)
torch.ops.aten._flash_attention_forward(q, q, q, offsets, offsets, 4, 4, 0.0, False, False)
print(cuda_standin.report().without_values)
"""
    error = python(source, fails=True)
    assert "cuda_standin: no values for aten::_flash_attention_forward: " in error
    assert "no values for attention over ragged batches" in error
    assert "'aten::_flash_attention_forward': (1, " in python(source, STANDIN_STRICT="0")


def test_an_error_of_late_work_comes_with_a_later_call(python):
    source = """
import torch, cuda_standin
offsets = torch.tensor([0, 4, 8], dtype=torch.int32, device="cuda")
q = torch.randn(8, 2, 16, device="cuda", dtype=torch.bfloat16)
with cuda_standin.run_late("all"):
    torch.ops.aten._flash_attention_forward(q, q, q, offsets, offsets, 4, 4, 0.0, False, False)
    torch.cuda.synchronize()
    print("synchronized")
    try: q + 1
    except RuntimeError as error: print(error)
print((q * 0).sum().item())
"""
    lines = python(source).splitlines()
    assert (lines[0], lines[-1]) == ("synchronized", "0.0")
    assert lines[1].startswith("cuda_standin: no values for aten::_flash_attention_forward: ")


def test_batch_norm_in_evaluation_has_values():
    norm, x = torch.nn.BatchNorm1d(4), torch.randn(8, 4)
    norm(x)
    norm.eval()
    torch.testing.assert_close(norm.cuda()(x.cuda()).cpu(), norm.cpu()(x))


def test_without_values_memory_keeps_what_was_there(python):
    source = "import torch; print(torch.full((3,), 7.0, device='cuda').tolist())"
    assert python(source) == "[7.0, 7.0, 7.0]"
    assert python(source, STANDIN_VALUES="0") == "[0.0, 0.0, 0.0]"


def test_what_is_skipped_leaves_zeros_and_whole_integers(python):
    source = """
import torch
big = torch.randn(4096, 4096, device="cuda") @ torch.randn(4096, 4096, device="cuda")
finite, nan = torch.isfinite(big).all().item(), torch.isnan(big).any().item()
print(big.abs().sum().item(), finite, nan, big.argmax(1).max().item())
ids = torch.arange(8 << 20, device="cuda")
print((ids * 2)[-1].item(), torch.ones(8 << 20, dtype=torch.bool, device="cuda").all().item())
print(torch.full((4,), 2.0, device="cuda").sum().item())
"""
    assert python(source, STANDIN_SKIP_BYTES="65536").splitlines() == ["0.0 True False 0", "16777214 True", "8.0"]
