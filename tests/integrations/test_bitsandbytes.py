"""Adapters on layers in 4 bits, as QLoRA trains them (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314), or 8."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.few_bits import assert_same_within
from support.trainers import llama
from torch import nn

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


FOUR_BITS = partial(bitsandbytes.nn.LinearNF4, bias=False, compute_dtype=torch.bfloat16)
EIGHT_BITS = partial(bitsandbytes.nn.Linear8bitLt, bias=False, has_fp16_weights=False)


def adapted(layer: Callable[..., nn.Module]) -> nn.Module:
    """A decoder with adapters on the linear layers of each decoder layer, which are ``layer``; its head is plain."""
    model = llama(hidden_size=64, intermediate_size=128, num_hidden_layers=3)
    for parent in [m for m in model.model.modules() if not isinstance(m, nn.Linear)]:
        for name, plain in [(n, m) for n, m in parent.named_children() if isinstance(m, nn.Linear)]:
            small = layer(plain.in_features, plain.out_features)
            small.load_state_dict(plain.state_dict())
            setattr(parent, name, small)
    model.to("cpu")  # where the weights are made small
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)).train()


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [(FOUR_BITS, torch.uint8), pytest.param(EIGHT_BITS, torch.int8, marks=pytest.mark.slow)],
    ids=["4", "8"],
)
def test_adapters_on_layers_in_few_bits_train_as_without_a_budget(layer, dtype):
    model = adapted(layer)
    weights = [m.weight for m in model.modules() if isinstance(m, layer.func)]
    assert len(weights) == 21 and all(w.dtype == dtype and not w.requires_grad for w in weights)

    assert_same_within(lambda: adapted(layer))
