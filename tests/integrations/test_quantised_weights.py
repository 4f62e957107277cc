"""Adapters on the quantised weights of torchao and HQQ, as people train them; bitsandbytes has a file of its own."""

from collections.abc import Callable

import pytest
import torch
from support.few_bits import assert_same_within
from support.trainers import llama
from torch import nn

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def torchao(config: str) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
        quantization.quantize_(model, getattr(quantization, config)())

    return quantise


def hqq(model: nn.Module) -> None:
    """Every linear layer in 4 bits, groups of 64."""
    quantize = pytest.importorskip("hqq.core.quantize", exc_type=ImportError)
    settings = quantize.BaseQuantizeConfig(nbits=4, group_size=64)
    for parent in [m for m in model.modules() if not isinstance(m, nn.Linear)]:
        for name, plain in [(n, m) for n, m in parent.named_children() if isinstance(m, nn.Linear)]:
            small = quantize.HQQLinear(plain, settings, compute_dtype=torch.float32, device="cpu")
            setattr(parent, name, small)


@pytest.mark.parametrize(
    ("quantise", "share"),
    [
        (torchao("Int8WeightOnlyConfig"), 0.5),
        (torchao("Int8DynamicActivationInt8WeightConfig"), 0.85),  # one of its products in forward takes 0.75 alone
        (torchao("Float8WeightOnlyConfig"), 0.5),
        (hqq, 0.5),
    ],
    ids=["int8", "int8-dynamic", "float8", "hqq"],
)
def test_adapters_train_as_without_a_budget(quantise, share):
    def make() -> nn.Module:
        model = llama(hidden_size=64, intermediate_size=128, num_hidden_layers=3)
        quantise(model.model.layers)
        torch.manual_seed(1)
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
        return peft.get_peft_model(model, adapters).train()

    assert_same_within(make, share)
