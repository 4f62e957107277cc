"""On set-ups that are as they should be no check speaks."""

import functools

import pytest
import torch
from support import sick_setups as setups
from support.sick_setups import TOKENS, Case, Stack, llama, mlp, plain
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import lowtide
from lowtide.settings import checkpointing_names


def _convolutions():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)]
    return Case(nn.Sequential(*layers), torch.randn(4, 3, 8, 8))


def _every_second_layer():
    model = llama(4, attention_dropout=0.1)
    checkpointing_names.enable(model, every_n_layers=2)
    return Case(model, TOKENS)


def _adapter():
    from peft import LoraConfig, get_peft_model

    model = llama()
    checkpointing_names.enable(model)
    return Case(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])), TOKENS)


def _encoder():
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return Case(nn.TransformerEncoder(layer, 2), torch.randn(4, 16, 64))


def _bfloat16():
    def step(model, batch):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return model(batch).float().square().mean()

    return Case(Stack(lambda: mlp(0.1), layers=4), torch.randn(256, 64), step)


def _sequential():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(mlp(0.1) for _ in range(4)))

        def forward(self, x):
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)

    return Case(Net(), torch.randn(256, 64))


def _reentrant():
    model = Stack(lambda: mlp(0.1), functools.partial(checkpoint, use_reentrant=True), layers=4)
    return Case(model, torch.randn(256, 64))


def _seq2seq():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, use_cache=False, decoder_start_token_id=0
    )
    return Case(T5ForConditionalGeneration(config).train(), TOKENS)


HEALTHY = {
    "linear": lambda: Case(nn.Linear(64, 64)),
    "convolutions": _convolutions,
    "decoder": lambda: Case(llama(), TOKENS),
    "decoder, every second layer": _every_second_layer,
    "adapter": _adapter,
    "encoder": _encoder,
    "autocast": _bfloat16,
    "sequential": _sequential,
    "reentrant, well used": _reentrant,
    "encoder and decoder": _seq2seq,
    "data parallel": lambda: setups.replicated(Stack(lambda: mlp(0.1), plain)),
    "selective": lambda: setups.selective(torch.ops.aten.addmm.default),
    "optimizer": lambda: setups.incomplete_optimizer(False),
}


# What they have in common with the others is looked at often enough.
SELDOM = ("decoder, every second layer", "adapter", "encoder and decoder", "reentrant, well used")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SELDOM)) for n in HEALTHY])
def test_nothing_is_said_of_a_healthy_set_up(name):
    case = HEALTHY[name]()
    try:
        found = lowtide.diagnose(case.model, case.batch, case.step, skip=["LT203"], **case.options)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    assert not found and not found.notes, str(found)
    assert len(found.checked) > 30
