"""What a trace without memory says of a CUDA device, beside what PyTorch's own allocator counts there."""

import contextlib
import gc
import json

import attention_choices
import op_workspaces
import pytest
import torch
from attention_choices import cases
from hollow_counted import compare, counted_peak_bytes, traced
from hollow_counted_models import made
from support.quick import thorough_but
from torch import nn

import lowtide
from lowtide.device.memory import allocated_bytes
from lowtide.hollow.cuda_attention import attention_kernel
from lowtide.hollow.cuda_workspaces import _RULES
from lowtide.hollow.kept_workspaces import are_given_back
from lowtide.step.optimizer_state import existing_state_bytes, optimizer_bytes

CASES = [
    ("llama", "float32", "sdpa"), ("gpt2", "bfloat16 autocast", "sdpa"), ("bert", "bfloat16", "eager"),
    ("mixtral", "float32", "eager"), ("t5", "LoRA", "eager"), ("qwen2", "float32", "sdpa"), ("vit", "bfloat16", "sdpa"),
    ("swin", "float32", "eager"), ("deepseek_v3", "bfloat16", "eager"), ("whisper", "float32", "sdpa"),
]  # fmt: skip
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "capturable": (torch.optim.AdamW, {"capturable": True}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "asgd": (torch.optim.ASGD, {}),
    "fused adagrad": (torch.optim.Adagrad, {"fused": True}),
}


@pytest.fixture(autouse=True)
def blocks_as_asked():
    """Segments grow, as in the benchmarks that these tests repeat; those of other tests keep their sizes."""
    if not torch.cuda.is_available():
        return
    from support.cuda_device import expandable_segments

    gc.collect()
    torch.cuda.empty_cache()
    with expandable_segments(True):
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.mark.parametrize(("kind", "variant", "attention"), thorough_but(CASES[:4], CASES))
def test_traced_peaks_are_counted_peaks(kind, variant, attention):
    for line in compare(kind, variant, attention):
        assert line["traced_peak_bytes"] == line["counted_peak_bytes"], line


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
                                  "binary_cross_entropy_with_logits"])  # fmt: skip
def test_a_mean_of_losses_holds_what_its_kernel_leaves_behind_it(monkeypatch, name):
    """In backward too: a mean that lies in the memory of all losses keeps that."""
    model, batch = nn.Linear(64, 512), torch.randn(2048, 64)

    def loss(model, batch):
        scores = model(batch)
        return getattr(nn.functional, name)(scores, torch.ones_like(scores))

    foreseen = traced(model, batch, loss)[1]
    monkeypatch.setattr("lowtide.hollow.output_specs.keeps_all_losses", lambda func, args: False)
    monkeypatch.delitem(_RULES, "aten.binary_cross_entropy_with_logits")
    without = traced(model, batch, loss)[1]
    model, batch = model.cuda(), batch.cuda()

    def step():
        model.zero_grad()
        loss(model, batch).backward()

    assert foreseen == counted_peak_bytes(step)
    assert without < foreseen or name == "huber_loss"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradients_of_wide_biases_take_more_than_their_layers(monkeypatch, dtype):
    """Their sums over rows are where the peak of such a step is; without their workspaces it is not found.

    Where a product takes its workspace anew, that is the peak.
    """
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in ((256, 1024), (1024, 256)) * 2]).to(dtype)
    batch = torch.randn(4096, 256, dtype=dtype)

    def loss(model, batch):
        return model(batch).float().square().mean()

    foreseen = traced(model, batch, loss)[1]
    monkeypatch.setattr("lowtide.hollow.workspaces.workspace_bytes", lambda *_: 0)
    without = traced(model, batch, loss)[1]
    model, batch = model.cuda(), batch.cuda()

    def step():
        model.zero_grad()
        loss(model, batch).backward()

    assert without < foreseen or are_given_back()
    assert foreseen == counted_peak_bytes(step)


def test_the_choice_of_attention_is_this_pytorchs():
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    numbers = {"math": "0", "flash": "1", "efficient": "2"}
    own = []
    for case in cases():
        (q, k, v, mask), named = case.arguments("meta")
        kernel = attention_kernel(q, k, v, mask, torch.cuda.get_device_capability(), release=release, **named)
        own.append(numbers[kernel])

    assert "".join(own) == attention_choices.chosen_by_pytorch()


def test_the_committed_workspaces_are_counted_again():
    known = json.loads(op_workspaces.RESULTS.read_text())
    device = next(d for d in ("h100", "a100", "l4") if d in torch.cuda.get_device_name().lower())
    assert known["calls"] == list(op_workspaces.signatures_of_calls())
    if known[device]["torch"] != torch.__version__:
        pytest.skip(f"the committed table is of PyTorch {known[device]['torch']}")
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        op_workspaces.take_blas_workspaces()
        found = [op_workspaces.counted_bytes(signature) for signature in known["calls"]]
    finally:
        torch.backends.cudnn.enabled = before

    assert found == known[device]["bytes"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_state_and_temporaries_are_those_that_are_counted(name):
    kind, settings = OPTIMIZERS[name]

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(300, 200), nn.LayerNorm(200), nn.Linear(200, 7))

    def step(model, batch):
        return model(batch).mean()

    batch, model = torch.randn(16, 300), net()
    graph = lowtide.trace(model, batch, step=step, optimizer=kind(model.parameters(), **settings), device="h100")
    model, batch = net().cuda(), batch.cuda()
    step(model, batch).backward()
    gc.collect()
    before = torch.cuda.memory_allocated()
    optimizer = kind(model.parameters(), **settings)
    optimizer.step()
    state = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    temporaries = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()

    assert (graph.resident["optimizer"], graph.optimizer_step_bytes) == (state, temporaries)
    assert existing_state_bytes(optimizer) == state
    traced = lowtide.trace(model, batch, step=step, optimizer=optimizer)
    assert traced.resident["optimizer"] == state  # and it is not among the others again
    assert traced.resident_bytes == allocated_bytes("cuda")


class KeptOnTheHost(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("momentum", torch.zeros(p.shape)).add_(p.grad.cpu())


def paged(parameters):
    return pytest.importorskip("bitsandbytes").optim.PagedAdamW32bit(parameters)


@pytest.mark.parametrize("make", [lambda parameters: KeptOnTheHost(parameters, {}), paged], ids=["host", "paged"])
def test_state_in_host_memory_takes_nothing_of_the_device(make):
    parameters = [nn.Parameter(torch.randn(400, 300, device="cuda"))]
    parameters[0].grad = torch.randn_like(parameters[0])
    optimizer = make(parameters)
    gc.collect()
    before = torch.cuda.memory_allocated()

    foreseen, _ = optimizer_bytes(optimizer, parameters)
    optimizer.step()
    gc.collect()

    assert foreseen == existing_state_bytes(optimizer) == torch.cuda.memory_allocated() - before == 0


@pytest.mark.parametrize("outer", [False, True])
def test_backward_runs_outside_the_autocast_region(outer):
    """As loops are written; the region may be around the trace or inside the step."""
    model, batch, loss = made("gpt2", "bfloat16 autocast", "eager")
    if outer:

        def loss(model, batch):
            return model(**batch).loss

    def region():
        return torch.autocast("cuda", torch.bfloat16) if outer else contextlib.nullcontext()

    with region():
        graph, peak = traced(model, batch, loss, accumulate=2)
    assert any('"bfloat16"' in json.dumps(signature) for signature in graph.signatures)
    model, batch = model.cuda(), {name: value.cuda() for name, value in batch.items()}

    def step():
        model.zero_grad(set_to_none=False)
        with region():
            found = loss(model, batch)
        found.backward()

    assert peak == counted_peak_bytes(step)
    with region():
        assert traced(model, batch, loss, None)[1] == peak


def test_numbers_of_attention_on_the_host_take_none_of_the_device():
    q = torch.randn(2, 4, 64, 32)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, q):
            q = q * self.scale
            return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True).mean()

    foreseen = lowtide.trace(Attention(), q, step=lambda m, b: m(b), device="h100")
    real = lowtide.trace(Attention().cuda(), q.cuda(), step=lambda m, b: m(b))

    for graph in (foreseen, real):
        (op,) = (o for o in graph.ops if o.name == "aten._scaled_dot_product_efficient_attention.default")
        assert [graph.storages[s].bytes for s in op.makes][2:] == [0, 0]
