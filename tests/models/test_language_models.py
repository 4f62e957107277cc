"""Language models as people train them: tied weights, ``generate`` between steps, LoRA."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.training_steps import (
    differing,
    outcome,
)
from torch import nn

import lowtide

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny_llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = dict(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**config, **changes})).train()


def tokens(length: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 64, (2, length))
    return {"input_ids": ids, "labels": ids}


def step_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(**batch).loss
    loss.backward()
    return outcome(model, loss)


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_with_tied_or_untied_weights_trains_exactly(tied, drops_all):
    model, batch = tiny_llama(tie_word_embeddings=tied), tokens()
    expected = step_of(copy.deepcopy(model), batch)
    fit = lowtide.fit(model, batch, budget="100%")

    found = step_of(model, batch)
    fit.remove()

    assert fit._lifecycle.plans_by_shape.plans[0].tape.counts.dropped > 10
    assert fit._lifecycle.plans_by_shape.plans[0].tape.counts.mismatched == 0
    assert differing(expected, found) == []
    if tied:
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_generate_between_steps_gives_the_plain_tokens(drops_all):
    model, batch = tiny_llama(), tokens()
    bare = copy.deepcopy(model)
    fit = lowtide.fit(model, batch, budget="100%")
    for _ in range(2):
        said = []
        for m in (bare, model):
            m.eval()
            said.append(m.generate(batch["input_ids"], max_new_tokens=6, do_sample=False))
            m.train()
        assert torch.equal(*said)
        assert differing(step_of(bare, batch), step_of(model, batch)) == []
    assert fit._lifecycle.plans_by_shape.plans[0].tape.counts.mismatched == 0
    assert len(fit.plans) == 1


@pytest.mark.filterwarnings("ignore")
def test_lora_on_a_frozen_base_trains_without_input_gradients(drops_all):
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model, batch = get_peft_model(tiny_llama(), settings), tokens()
    expected = step_of(copy.deepcopy(model), batch)
    fit = lowtide.fit(model, batch, budget="100%")

    found = step_of(model, batch)
    fit.remove()

    assert fit._lifecycle.plans_by_shape.plans[0].tape.counts.dropped > 10
    assert differing(expected, found) == []
    adapters = [n for n in found if "lora_" in n]
    assert adapters
    assert all(found[n] is not None for n in adapters)
    assert any(found[n].abs().sum() > 0 for n in adapters)
