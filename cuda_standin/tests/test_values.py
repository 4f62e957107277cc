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


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_dropout_in_attention_is_the_same_forward_and_backward(kernel, captured):
    torch.cuda.manual_seed(0)
    q = torch.randn(1, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
    v = torch.eye(8, 16, device="cuda", dtype=torch.bfloat16).expand(1, 2, 8, 16).clone().requires_grad_()

    def forward_and_backward():
        with torch.nn.attention.sdpa_kernel(KERNELS[kernel]):
            out = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
        return out.detach(), torch.autograd.grad(out.sum(), v)[0]

    out, grad = forward_and_backward()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, grad = forward_and_backward()
        graph.replay()
    weights = out[..., :8]  # of each query, since the values are unit vectors
    torch.testing.assert_close(grad[..., 0].float(), weights.float().sum(2), rtol=3e-2, atol=3e-2)
    assert 0.2 < (weights == 0).float().mean().item() < 0.8


@pytest.mark.parametrize("window", [(2, 0), (-1, 1), (3, -1), (-1, -1)], ids=str)
def test_flash_attention_over_a_window_and_ragged_batches_is_that_of_its_definition(window):
    torch.manual_seed(0)
    lengths, keys = [3, 7, 5], [4, 7, 9]
    q = torch.randn(sum(lengths), 2, 16, dtype=torch.bfloat16)
    k, v = torch.randn(2, sum(keys), 2, 16, dtype=torch.bfloat16).unbind()
    grad = torch.randn_like(q)
    ends = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device="cuda") for n in (lengths, keys)]
    sides = {"window_size_left": window[0], "window_size_right": window[1]}
    leaves = [t.clone().float().requires_grad_() for t in (q, k, v)]
    outs, lses = [], []
    for a, b, c in zip(leaves[0].split(lengths), leaves[1].split(keys), leaves[2].split(keys)):
        scores = torch.einsum("qhw,khw->hqk", a, b) / 4
        after = torch.arange(len(b)) - torch.arange(len(a))[:, None] - (len(b) - len(a))  # of the key, by the diagonal
        seen = (after <= (window[1] if window[1] >= 0 else 99)) & (after >= -(window[0] if window[0] >= 0 else 99))
        scores = scores.masked_fill(~seen, -math.inf)
        outs.append(torch.einsum("hqk,khw->qhw", scores.softmax(2), c))
        lses.append(scores.logsumexp(2))
    expected = torch.cat(outs)
    grads = torch.autograd.grad(expected, leaves, grad.float())

    q, k, v, grad = (t.cuda() for t in (q, k, v, grad))
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, *ends, 7, 9, 0.0, False, False, **sides
    )
    made = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *ends, 7, 9, 0.0, False, state, unused, **sides
    )
    for a, b in zip([out, *made], [expected, *grads]):
        torch.testing.assert_close(a.cpu().float(), b, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.cpu(), torch.cat(lses, 1), rtol=1e-4, atol=1e-4)


def test_efficient_attention_over_ragged_batches_is_that_of_each_sequence():
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, 12, 2, 16, device="cuda").unbind()
    ends = torch.tensor([0, 5, 12], dtype=torch.int32, device="cuda")
    out, lse, *state = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, ends, ends, 7, 7, 0.0, 1, compute_log_sumexp=True
    )
    made = torch.ops.aten._efficient_attention_backward(
        grad, q, k, v, None, out, ends, ends, 7, 7, lse, 0.0, *state[:2], 1, False
    )
    leaves = [t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    parts = zip(*(t.split([5, 7], 2) for t in leaves))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], 2)
    grads = torch.autograd.grad(expected, leaves, grad.transpose(1, 2))
    for a, b in zip([out, *made], [expected, *grads]):
        torch.testing.assert_close(a.transpose(1, 2), b, rtol=1e-4, atol=1e-5)


def test_an_operator_that_has_no_values_raises_or_is_told(python):
    source = """
import torch, cuda_standin
q, ends = torch.randn(8, 2, 16, device="cuda", dtype=torch.bfloat16), torch.tensor([0, 8]).int().cuda()
torch.ops.aten._flash_attention_forward(q, q, q, ends, ends, 8, 8, 0.0, False, False, seqused_k=ends[1:])
print(cuda_standin.report().without_values)
"""
    error = python(source, fails=True)
    assert "cuda_standin: no values for aten::_flash_attention_forward: " in error
    assert "no values for attention with seqused_k" in error
    assert "'aten::_flash_attention_forward': (1, " in python(source, STANDIN_STRICT="0")


def test_an_error_of_late_work_comes_with_a_later_call(python):
    source = """
import torch, cuda_standin
offsets = torch.tensor([0, 4, 8], dtype=torch.int32, device="cuda")
q = torch.randn(8, 2, 16, device="cuda", dtype=torch.bfloat16)
with cuda_standin.run_late("all"):
    torch.ops.aten._flash_attention_forward(q, q, q, offsets, offsets, 4, 4, 0.0, False, False, seqused_k=offsets[1:])
    torch.cuda.synchronize()
    print("synchronized")
    try: q + 1
    except RuntimeError as error: print(error)
print((q * 0).sum().item())
"""
    lines = python(source).splitlines()
    assert (lines[0], lines[-1]) == ("synchronized", "0.0")
    assert lines[1].startswith("cuda_standin: no values for aten::_flash_attention_forward: ")


@pytest.mark.parametrize("number", [2**63 + 5, 7])
def test_an_unsigned_item_is_whole(number):
    assert torch.tensor([number], dtype=torch.uint64).cuda().item() == number


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


def entries(device, dtype=torch.float32):
    """Five entries, of which two pairs are at the same place."""
    places = torch.tensor([[0, 1, 1, 3, 0], [1, 0, 0, 2, 1]])
    return torch.sparse_coo_tensor(places, torch.arange(1.0, 6.0, dtype=dtype), (5, 4)).to(device)


def rows(device):
    return torch.arange(12.0, device=device).reshape(4, 3)


def trained_embedding(device):
    """Its gradient has one row for each token, however often it comes."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(16, 4, sparse=True).to(device)
    optimizers = torch.optim.SparseAdam([table.weight], 0.1), torch.optim.SGD([table.weight], 0.1)
    for step in range(3):
        table((torch.tensor([1, 3, 3, 7, 1]) + step).to(device)).square().sum().backward()
        assert table.weight.grad.coalesce()._nnz() == 3
        for optimizer in optimizers:
            optimizer.step()
        table.weight.grad = None
    return table.weight.detach(), *(optimizers[0].state[table.weight][name] for name in ("exp_avg", "exp_avg_sq"))


def gradient_of_entries(device):
    sparse = entries(device).requires_grad_()
    torch.sparse.mm(sparse, rows(device)).square().sum().backward()
    return sparse.grad.coalesce()


OF_SPARSE = {
    "equal places are summed": lambda d: (entries(d).coalesce(), entries(d).coalesce().values()),
    "in half": lambda d: entries(d, torch.bfloat16).coalesce(),
    "times a matrix": lambda d: torch.sparse.mm(entries(d), rows(d)),
    "gradient of it": gradient_of_entries,
    "added": lambda d: (torch.ones(5, 4, device=d) + entries(d), (entries(d) + entries(d)).coalesce()),
    "added in place": lambda d: torch.ones(5, 4, device=d).add_(entries(d), alpha=2),
    "multiplied": lambda d: ((entries(d) * entries(d)).coalesce(), entries(d) * 3),
    "softmax": lambda d: torch.sparse.softmax(entries(d).coalesce(), 1),
    "sums": lambda d: (torch.sparse.sum(entries(d).coalesce(), 0).coalesce(), torch.sparse.sum(entries(d))),
    "a product of two": lambda d: (entries(d) @ entries(d).t()).coalesce(),
    "in a batch": lambda d: torch.bmm(torch.stack([entries(d)] * 2).coalesce(), rows(d).expand(2, 4, 3)),
    "chosen": lambda d: entries(d).coalesce().index_select(0, torch.tensor([1, 3], device=d)).coalesce(),
    "masks": lambda d: torch.ones(5, 4, device=d).sparse_mask(entries(d).coalesce()),
    "rows": lambda d: (entries(d).coalesce().to_sparse_csr() @ rows(d), entries(d).coalesce().to_sparse_csr()),
    "an embedding": trained_embedding,
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("what", OF_SPARSE)
def test_sparse_tensors_have_the_cpus_values(what):
    here, there = (made if isinstance(made, tuple) else (made,) for made in map(OF_SPARSE[what], ("cpu", "cuda")))
    for one, other in zip(here, there, strict=True):
        assert other.is_cuda and one.layout == other.layout and one.dtype == other.dtype
        if one.layout != torch.strided:
            assert one._nnz() == other._nnz()
        torch.testing.assert_close(other.cpu().to_dense(), one.to_dense())


def test_entries_are_counted_where_values_are_skipped(python):
    source = """
import torch
table = torch.nn.Embedding(50000, 1024, sparse=True, device="cuda")
ids = torch.randint(0, 3000, (8, 1024), device="cuda")
table(ids).sum().backward()
whole = table.weight.grad.coalesce()
assert whole._values().shape == (ids.unique().numel(), 1024) and whole._values().abs().sum().item() == 0
torch.optim.SparseAdam([table.weight]).step()
places = torch.arange(3000, device="cuda").repeat(2, 1)
made = torch.sparse.mm(torch.sparse_coo_tensor(places, torch.ones(3000, device="cuda")), table.weight[:3000])
print(tuple(made.shape), made.abs().sum().item())
"""
    assert python(source, STANDIN_SKIP_BYTES="65536", STANDIN_STRICT="0") == "(3000, 1024) 0.0"


def test_whose_kernels_ran_as_nothing_is_known(python):
    source = """
import torch, bitsandbytes, cuda_standin
parameter = torch.nn.Parameter(torch.zeros(1 << 16, device="cuda"))
parameter.grad = torch.ones_like(parameter)
torch.optim.AdamW([parameter]).step()
assert cuda_standin.foreign_libraries() == []
bitsandbytes.optim.AdamW8bit([parameter]).step()
print(*cuda_standin.foreign_libraries())
"""
    pytest.importorskip("bitsandbytes")
    assert python(source).startswith("libbitsandbytes_cuda")


def test_scripted_code_has_values(python):
    """TorchScript would compile kernels of its own, of which nobody knows what they compute."""
    source = """
import torch
gate = torch.jit.script(torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Sigmoid()))
x = torch.randn(1000, 64, device="cuda", requires_grad=True)
torch.full_like(x, float("nan"))  # what a kernel that does nothing would leave
made = [gate(x) for _ in range(5)]
print(all(torch.equal(y, x.tanh().sigmoid()) for y in made))
"""
    assert python(source) == "True"
    assert python("import torch; torch._C._jit_override_can_fuse_on_gpu(True)" + source) == "False"
