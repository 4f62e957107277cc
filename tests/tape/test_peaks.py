"""Predicted peaks equal measured ones to the byte where the tape itself holds memory."""

import pytest
import torch
import torch.nn.functional as F
from support.training_steps import drop_everything
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.measurement.allocator import peak_bytes
from lowtide.step.operators import draws_random_numbers


class Attending(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout
        self.heads = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.heads(x).view(-1, 4, 3, 2, 4).transpose(1, 3).unbind(2)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_attention_holds_the_generator_state_that_its_replay_needs_and_no_other(dropout):
    model, x = Attending(dropout), torch.randn(2, 4, 8)
    graph = lowtide.trace(model, x)
    plan = drop_everything(graph)

    proof = lowtide.verify(model, x, plan, rounds=0)

    assert proof.equal and proof.dropped_ops
    assert proof.measured_peak_bytes == proof.predicted_peak_bytes
    assert any(op.rng_bytes for op in graph.ops) == bool(dropout)


def test_an_operator_draws_unless_its_dropout_is_zero():
    q, attention = torch.ones(1, 1, 4, 4), torch.ops.aten._scaled_dot_product_flash_attention.default

    assert draws_random_numbers(torch.ops.aten.rand.default, ([2],), {})
    assert draws_random_numbers(attention, (q, q, q, 0.5), {}) and draws_random_numbers(
        attention, (q, q, q), {"dropout_p": 0.5}
    )
    assert not draws_random_numbers(attention, (q, q, q, 0.0), {}) and not draws_random_numbers(
        attention, (q, q, q), {}
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_graphs_that_a_checkpoint_region_makes_in_backward_hold_nothing_afterwards(reentrant):
    class Regions(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant, preserve_rng_state=False)
            return x

    model, x = Regions(), torch.randn(64, 8, requires_grad=True)
    graph = lowtide.trace(model, x)
    plan = lowtide.solve(graph, lowtide.Costs((1.0,) * len(graph.ops)), method="none")

    proof = lowtide.verify(model, x, plan, rounds=0)

    assert proof.equal and proof.measured_peak_bytes == proof.predicted_peak_bytes


def test_a_backward_inside_of_apply_takes_what_one_after_it_takes():
    class Experts(nn.Module):
        """The gradient of each slice is as large as all of the weights, and they are added."""

        def __init__(self):
            super().__init__()
            self.weights = nn.Parameter(torch.randn(4, 64, 64) / 8)

        def forward(self, x):
            return sum((x @ self.weights[i]).tanh() for i in range(4))

    model, x = Experts(), torch.randn(16, 64)
    model.weights.grad = torch.zeros_like(model.weights)
    plan = drop_everything(lowtide.trace(model, x))

    def step(*, inside):
        with lowtide.apply(model, plan):
            loss = model(x).square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()

    predicted = plan.predicted_peak_bytes - plan.resident_bytes
    assert peak_bytes(lambda: step(inside=False)) == peak_bytes(lambda: step(inside=True)) <= predicted


def test_a_region_goes_on_after_a_backward_inside():
    model, x = Attending(0.5), torch.randn(2, 4, 8)
    plan = drop_everything(lowtide.trace(model, x))
    with lowtide.apply(model, plan) as applied:
        dropped = []
        for _ in range(3):
            model(x).square().mean().backward()
            dropped.append(applied.counts.dropped)
    assert dropped == [dropped[0], 2 * dropped[0], 3 * dropped[0]] and dropped[0]
