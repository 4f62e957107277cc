"""Small models, and what the tests of settings ask of a plan."""

import re

import pytest
import torch

import lowtide
from lowtide.graph.costs import Costs

LAYERS = 4


def decoder(**changes):
    """A small decoder of transformers, and a batch; the peak is inside the layers, not in the loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = dict(hidden_size=64, num_hidden_layers=LAYERS, intermediate_size=172, num_attention_heads=4,
                  num_key_value_heads=2, vocab_size=64, use_cache=False)  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**config, **changes})).train()
    ids = torch.randint(0, 64, (4, 64))
    return model, {"input_ids": ids, "labels": ids}


def mixture():
    """The same with experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=2,
                           num_key_value_heads=2, vocab_size=64, num_local_experts=4, use_cache=False)  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (2, 16))
    return MixtralForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


class Traced:
    """A model and its plain step, each op one millisecond."""

    def __init__(self, model, batch):
        self.model, self.batch = model, batch
        self.graph = lowtide.trace(model, batch)
        self.costs = Costs((1.0,) * len(self.graph.ops))


@pytest.fixture(scope="session")
def llama():
    return Traced(*decoder())


@pytest.fixture(scope="session")
def eager_llama():
    return Traced(*decoder(attn_implementation="eager"))


@pytest.fixture(scope="session")
def mixtral():
    return Traced(*mixture())


def recomputed(plan):
    """Module paths in which stored tensors are made again."""
    return {plan.scope(d) for d in plan.decisions if d.action == "recompute" and d.stored}


def layers_of(plan):
    """Numbers of the layers in which stored tensors are made again."""
    return {int(found[1]) for path in recomputed(plan) if (found := re.search(r"layers\.(\d+)", path))}
