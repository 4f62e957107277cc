"""A step traced without memory has the peak of the step traced on real tensors, to the byte."""

from dataclasses import replace

import pytest
import torch
from support.quick import thorough_but
from torch import nn
from zoo import architectures
from zoo.batches import loss_of

import lowtide
from lowtide.graph.costs import Costs
from lowtide.hollow.models import language_batch
from lowtide.simulation.simulator import simulate_actions

LANGUAGE, IMAGE, BOTH = "causal language", "image classification", "sequence to sequence"
KINDS = [
    (LANGUAGE, "llama"), (LANGUAGE, "qwen3"), (LANGUAGE, "gemma3_text"), (LANGUAGE, "gpt2"), (LANGUAGE, "mamba"),
    (LANGUAGE, "mixtral"), (LANGUAGE, "deepseek_v3"), ("masked language", "bert"), (BOTH, "t5"), (IMAGE, "vit"),
    (IMAGE, "resnet"), ("speech to text", "whisper"), ("speech recognition (CTC)", "wav2vec2"),
]  # fmt: skip
QUICK_KINDS = ((LANGUAGE, "llama"), (LANGUAGE, "mixtral"), (BOTH, "t5"), (IMAGE, "resnet"))


OF_THE_PROCESS = ("other", "workspaces")  # a real step finds them on a device, whoever made them


def peak_bytes(graph):
    resident = {part: 0 if part in OF_THE_PROCESS else size for part, size in graph.resident.items()}
    of_the_step = replace(graph, resident=resident)
    return simulate_actions(of_the_step, Costs(op_ms=(0.0,) * len(graph.ops)), {}).peak_bytes


def with_equal_experts(real, graph):
    """``real`` with the workspaces of ``graph`` where they follow from how many tokens each expert was given."""
    routed = {s for s, named in enumerate(real.signatures) if "_grouped_mm" in str(named)}
    assert [op.signature for op in real.ops] == [op.signature for op in graph.ops]
    ops = (
        replace(op, workspace_bytes=other.workspace_bytes) if op.signature in routed else op
        for op, other in zip(real.ops, graph.ops, strict=True)
    )
    return replace(real, ops=tuple(ops))


def here():
    """Where the real step runs."""
    return torch.get_default_device().type


def autocast_step_on(device_type):
    """A step; to ask for the device inside it would make a tensor there."""

    def step(model, batch):
        with torch.autocast(device_type, torch.bfloat16):
            return loss_of(model(**batch))

    return step


@pytest.mark.parametrize(
    "precision",
    ["float32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("autocast", "bfloat16"))],
)
@pytest.mark.parametrize(("task", "kind"), thorough_but(QUICK_KINDS, KINDS))
def test_the_peak_is_that_of_the_real_trace(task, kind, precision):
    made = architectures.build(task, kind)
    model, batch = made.model, made.batch
    if precision == "bfloat16":
        model = model.bfloat16()
        batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    step = autocast_step_on(here()) if precision == "autocast" else lambda model, batch: loss_of(model(**batch))
    torch.manual_seed(0)
    real = lowtide.trace(model, batch, step=step)
    torch.manual_seed(0)

    graph = lowtide.trace(model, batch, step=step, device=here())

    if "balanced experts" in graph.provenance.get("assumed", ""):
        real = with_equal_experts(real, graph)
    assert peak_bytes(graph) == peak_bytes(real)
    assert all(graph.resident[part] == size for part, size in real.resident.items() if part not in OF_THE_PROCESS)


def test_a_workspace_is_found_without_the_real_inputs():
    model, batch = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), torch.randn(2, 8, 32, 32)

    graph, real = lowtide.trace(model, batch, device=here()), lowtide.trace(model, batch)

    assert sum(op.workspace_bytes for op in real.ops) > 0
    assert [op.workspace_bytes for op in graph.ops] == [op.workspace_bytes for op in real.ops]


def test_a_model_on_meta_has_the_peak_of_a_real_one():
    def made():
        return nn.Sequential(nn.Embedding(100, 64), nn.LayerNorm(64), nn.Linear(64, 100))

    batch = torch.zeros(4, 16, dtype=torch.int64)
    with torch.device("meta"):
        model = made()

    graph = lowtide.trace(model, batch.to("meta"), device=here())

    assert peak_bytes(graph) == peak_bytes(lowtide.trace(made(), batch))
    assert all(p.is_meta for p in model.parameters())


def test_a_configuration_needs_no_model():
    import transformers

    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
    config = transformers.LlamaConfig(**sizes)
    model = transformers.LlamaForCausalLM(config).train()
    model.config.use_cache = False
    batch = language_batch(2, 32)

    graph = lowtide.trace(config, batch, device=here())

    on_device = {name: tensor.to(here()) for name, tensor in batch.items()}
    assert peak_bytes(graph) == peak_bytes(lowtide.trace(model, on_device))
    assert graph.provenance["model"] == "LlamaForCausalLM"


@pytest.mark.thorough
def test_memory_grows_by_the_same_with_each_layer():
    import transformers

    def peak(layers):
        sizes = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, vocab_size=32000)
        config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers, num_key_value_heads=8)
        config.dtype = torch.bfloat16
        return peak_bytes(lowtide.trace(config, language_batch(1, 8192), device="cpu"))

    one, two, three = map(peak, (1, 2, 3))

    assert three - two == two - one > 2**30


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        y = self.inner(x)
        kept = y[y[:, 0] > 0]
        scale = 2.0 if y.sum() > 0 else 1.0
        return (torch.cat([y, kept]) * scale).square().mean()


def test_what_depends_on_values_that_nobody_has_is_listed():
    graph = lowtide.trace(Deciding(), torch.randn(8, 64), step=lambda m, b: m(b), device="cpu")
    listed = graph.provenance["assumed"].splitlines()

    assert "index of values that nobody has: went as 0 rows (1 times, first in (the step))" in listed
    assert any("local_scalar_dense of values that nobody has: went as False" in line for line in listed)


def test_what_derives_from_real_data_is_exact_and_not_listed():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Embedding(10, 4096)

        def forward(self, ids):
            kept = self.inner(ids)[ids > 4]
            return kept.square().mean() if bool((ids == 3).any()) else kept.mean()

    ids = torch.tensor([[3, 5, 6], [7, 1, 9]])

    graph, real = (lowtide.trace(Masked(), ids, step=lambda m, b: m(b), device=d) for d in (here(), None))

    assert graph.provenance["assumed"] == ""
    assert [op.name for op in graph.ops] == [op.name for op in real.ops]
    assert peak_bytes(graph) == peak_bytes(real)


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="device='h1000' is not in the table. Nearest: h100"):
        lowtide.trace(nn.Linear(2, 2), torch.zeros(2, 2), device="h1000")
