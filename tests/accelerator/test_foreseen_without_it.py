"""A step traced without memory for CUDA beside the accelerator's own count: its allocator has CUDA's rules.

Attention is eager: the accelerator has no fused kernel where CUDA has one, and none of CUDA's workspaces.
"""

import pytest
import torch
from support.quick import thorough_but

import lowtide
from lowtide.hollow.memory import hollow
from lowtide.hollow.mode import HollowMode
from lowtide.hollow.optimizer import hollow_optimizer_bytes
from lowtide.measurement.allocator import peak_bytes

transformers = pytest.importorskip("transformers")

SMALL = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=3, vocab_size=500)
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL, num_key_value_heads=2),
    "gpt2": transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=500),
    "bert": transformers.BertConfig(**SMALL),
    "t5": transformers.T5Config(
        d_model=64, d_ff=128, num_heads=4, d_kv=16, num_layers=2, vocab_size=500, decoder_start_token_id=0
    ),
    "vit": transformers.ViTConfig(**{**SMALL, "image_size": 32, "patch_size": 8}),
}
PARAMETERS = [(500, 64), (64, 64), (128, 64), (64,), (64, 128), (7,)]
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw, one at a time": (torch.optim.AdamW, {"foreach": False}),
    "adafactor": (torch.optim.Adafactor, {}),
    "muon": (torch.optim.Muon, {}),
}


def model(name):
    torch.manual_seed(0)
    config = CONFIGS[name]
    config._attn_implementation = "eager"
    kinds = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM", "vit": "AutoModelForImageClassification"}
    return getattr(transformers, kinds.get(name, "AutoModelForCausalLM")).from_config(config).train()


def batch(name, where):
    if name == "vit":
        return {"pixel_values": torch.zeros(4, 3, 32, 32, device=where), "labels": torch.zeros(4, dtype=torch.long)}
    ids = torch.zeros(4, 96, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def step_on(device, autocast):
    def step(model, batch):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            return model(**batch).loss

    return step


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", thorough_but(("llama", "t5"), CONFIGS))
def test_the_foreseen_peak_is_the_one_that_the_device_counts(device, name, autocast):
    foreseen = lowtide.trace(model(name).to("meta"), batch(name, "meta"), device="cuda", step=step_on("cuda", autocast))
    plan = lowtide.solve(foreseen, lowtide.Costs((1.0,) * len(foreseen.ops)), method="none")
    real = model(name).to("standin")
    given = {key: x.to("standin") for key, x in batch(name, "cpu").items()}
    step = step_on("standin", autocast)

    with device.expandable_segments(True):
        counted = peak_bytes(lambda: step(real, given).backward(), "standin")
    assert plan.predicted_peak_bytes - foreseen.start_bytes == counted


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_state_and_temporaries_are_those_that_the_device_counts(device, name):
    kind, settings = OPTIMIZERS[name]
    shapes = [shape for shape in PARAMETERS if len(shape) == 2 or name != "muon"]
    with HollowMode("cuda"):
        without = [
            torch.nn.Parameter(hollow(shape, torch.empty(shape, device="meta").stride(), torch.float32))
            for shape in shapes
        ]
        foreseen = hollow_optimizer_bytes(kind, settings, without, kernels="cuda", block_bytes=512)
    real = [torch.nn.Parameter(torch.randn(shape, device="standin")) for shape in shapes]
    for p in real:
        p.grad = torch.randn_like(p)
    optimizer = kind(real, **settings)
    with device.expandable_segments(True):
        before = torch.accelerator.memory_allocated()
        optimizer.step()
        torch.accelerator.synchronize()
        state = torch.accelerator.memory_allocated() - before
        assert foreseen == (state, peak_bytes(optimizer.step, "standin"))
