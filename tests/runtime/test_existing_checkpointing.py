"""Checkpointing that is on already: transformers' flag is replaced by the plan, any other is told."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2, vocab_size=64)
    ).train()
    model.gradient_checkpointing_enable()
    return model


@pytest.fixture
def batch():
    ids = torch.randint(0, 64, (4, 32))
    return {"input_ids": ids, "labels": ids}


def train(model, batch):
    torch.manual_seed(0)
    loss = model(**batch).loss
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return loss.item(), gradients


def same(a, b):
    return a[0] == b[0] and all(map(torch.equal, a[1], b[1]))


def test_transformers_checkpointing_is_off_while_steps_are_watched_and_back_afterwards(llama, batch):
    plain = copy.deepcopy(llama)
    with lowtide.fit(llama, budget="60%") as fit:
        assert not llama.is_activation_checkpointing
        llama.gradient_checkpointing_enable()  # as a Trainer may later still: the first step looks
        assert same(train(plain, batch), train(llama, batch))
        assert not llama.is_activation_checkpointing
        fit.wait()
        assert same(train(plain, batch), train(llama, batch))
        assert fit.status().in_force
        assert sum("gradient checkpointing was on" in r for r in fit.status().reasons) == 1
        assert fit.plan.counts["recompute"] > 0
    assert llama.is_activation_checkpointing
    assert same(train(plain, batch), train(llama, batch))


def test_switched_on_in_mid_training_it_is_off_before_the_next_planned_step(llama, batch):
    plain = copy.deepcopy(llama)
    with lowtide.fit(llama, budget="60%") as fit:
        assert same(train(plain, batch), train(llama, batch))
        fit.wait()
        llama.gradient_checkpointing_enable()  # TRL does so after it has generated
        assert same(train(plain, batch), train(llama, batch))
        assert fit.status().in_force
        assert not llama.is_activation_checkpointing


def test_it_is_off_while_a_batch_is_planned_for(llama, batch):
    with lowtide.fit(llama, batch, budget="60%") as fit:
        assert not llama.is_activation_checkpointing
        assert any("gradient checkpointing was on" in w for w in fit.warnings)
        assert fit.plan.counts["recompute"] > 0
    assert llama.is_activation_checkpointing


def test_a_fit_that_is_refused_switches_it_on_again(llama, batch):
    with pytest.raises(lowtide.BudgetInfeasibleError):
        lowtide.fit(llama, batch, budget=1)
    assert llama.is_activation_checkpointing


def test_kept_it_stays_on_and_is_told(llama, batch):
    plain = copy.deepcopy(llama)
    with lowtide.fit(llama, budget="90%", checkpointing="keep") as fit:
        assert same(train(plain, batch), train(llama, batch))
        assert llama.is_activation_checkpointing
        assert "stays on" in " ".join(fit.status().reasons)
    with pytest.raises(ValueError, match="'replace' or 'keep'"):
        lowtide.fit(llama, checkpointing="off")


def test_checkpointing_of_the_users_own_is_told():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model, x = Checkpointed(), torch.randn(128, 64)
    plain = copy.deepcopy(model)
    with lowtide.fit(model, budget="95%") as fit:
        model(x).square().mean().backward()
        plain(x).square().mean().backward()
        told = " ".join(fit.status().reasons)
    assert "layers.0 is checkpointed (torch.utils.checkpoint)" in told
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
