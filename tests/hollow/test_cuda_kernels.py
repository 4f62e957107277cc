"""Steps for a CUDA device on a machine that has none: which kernels they run, and scripts that name the device."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.hollow.cuda_kernels import AUTOCAST_FLOAT32, AUTOCAST_FLOAT32_RESULT, NOT_IN_CUDA_AUTOCAST
from lowtide.hollow.devices import TargetDevice


class Attention(nn.Module):
    def __init__(self, rate=0.0, mask=False, checkpointed=False):
        super().__init__()
        self.project, self.norm = nn.Linear(64, 192), nn.RMSNorm(64)
        self.rate, self.mask, self.checkpointed = rate, mask, checkpointed

    def inner(self, x):
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.project(x).chunk(3, dim=-1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.mask else None
        return functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)

    def forward(self, x):
        y = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return functional.dropout(self.norm(y), self.rate)


def names(model, dtype=torch.bfloat16, **options):
    graph = lowtide.trace(model.to(dtype), torch.randn(2, 32, 64, dtype=dtype), device="cuda", **options)
    return graph, [op.name.removeprefix("aten.").partition(".")[0] for op in graph.ops]


def test_attention_dropout_and_norm_are_cudas():
    graph, ops = names(Attention(rate=0.1))

    assert "_scaled_dot_product_flash_attention" in ops and "_scaled_dot_product_flash_attention_backward" in ops
    assert "native_dropout" in ops and "_fused_rms_norm" in ops and "_fused_rms_norm_backward" in ops
    assert graph.device == "cuda" and not any("_for_cpu" in name for name in ops)
    assert all(s.bytes % 512 == 0 for s in graph.storages)
    assert {op.rng_bytes for op in graph.ops if op.name == "aten.native_dropout.default"} == {0}


def test_attention_with_a_mask_or_on_an_older_device_is_another_kernel():
    assert "_scaled_dot_product_efficient_attention" in names(Attention(mask=True))[1]
    older = lowtide.trace(
        Attention().bfloat16(), torch.randn(2, 32, 64, dtype=torch.bfloat16),
        device=TargetDevice("cuda", "T4", capability=(7, 5)),
    )  # fmt: skip
    assert any("_softmax" in op.name for op in older.ops) and older.device_name == "T4"


def test_recomputation_inside_the_step_runs_the_same_kernels():
    _, ops = names(Attention(checkpointed=True))

    assert ops.count("_scaled_dot_product_flash_attention") == 2


def test_the_cpu_is_as_it_was_afterwards():
    names(Attention(rate=0.1))
    model, batch = Attention(rate=0.1), torch.randn(2, 32, 64)

    assert any("flash_attention_for_cpu" in op.name for op in lowtide.trace(model, batch).ops)
    assert not torch.cuda.is_available() or torch.cuda.device_count()
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).softmax(0).dtype == torch.bfloat16


def test_the_lists_of_autocast_are_the_installed_ones():
    listed = {
        key: {n.removeprefix("aten::") for n in torch._C._dispatch_get_registrations_for_dispatch_key(key)}
        for key in ("AutocastCUDA", "AutocastCPU")
    }

    assert {*AUTOCAST_FLOAT32, *AUTOCAST_FLOAT32_RESULT} <= listed["AutocastCUDA"]
    assert set(NOT_IN_CUDA_AUTOCAST) <= listed["AutocastCPU"] - listed["AutocastCUDA"]


def test_autocast_keeps_cudas_float32_list():
    def step(model, batch):
        with torch.autocast("cuda", torch.bfloat16):
            y = model(batch)
            assert y.dtype == torch.bfloat16
            assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == torch.get_autocast_gpu_dtype() == torch.bfloat16
            assert y.softmax(-1).dtype == y.pow(2).dtype == torch.float32
            return y.float().mean()

    lowtide.trace(nn.Linear(64, 64), torch.randn(2, 64), step=step, device="cuda")


def test_a_script_may_name_the_device():
    def step(model, batch):
        model.cuda()
        x = batch.to("cuda:0", non_blocking=True) + torch.ones(64, device="cuda")
        assert torch.cuda.is_available()
        with torch.amp.autocast("cuda"):
            y = checkpoint(lambda x: model(x.cuda() * torch.ones(1, device="cuda")), x, use_reentrant=False)
            assert y.dtype == torch.float16
        return y.float().mean()

    model = nn.Linear(64, 64)
    home = model.weight.device

    graph = lowtide.trace(model, torch.randn(8, 64), step=step, device="cuda")

    assert any(op.name == "aten.mm.default" or op.name == "aten.addmm.default" for op in graph.ops)
    assert model.weight.device == home
    with (
        pytest.raises((AssertionError, RuntimeError)) if not torch.cuda.is_available() else pytest.MonkeyPatch.context()
    ):
        torch.ones(1).cuda()


def test_a_device_has_its_own_module_after_a_script_asked_for_it():
    def step(model, batch):
        torch.get_device_module("cuda:0")
        return model(batch).mean()

    lowtide.trace(nn.Linear(64, 64), torch.randn(2, 64), step=step, device="cuda")

    assert torch.get_device_module("cuda:0") is torch.cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 256])
def test_batch_norm_is_traced_at_any_size_without_running_a_kernel(rows, dtype):
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64)).to(dtype)

    graph = lowtide.trace(model, torch.empty(rows, 3, 224, 224, dtype=dtype, device="meta"), device="cuda")

    norm = next(op for op in graph.ops if "norm" in op.name)
    sizes = [graph.storages[s].bytes for s in norm.makes]
    assert sizes == [rows * 64 * 112 * 112 * dtype.itemsize, 512, 512]  # statistics of 64 channels: a block each
    assert "native_batch_norm" not in graph.provenance["assumed"]
