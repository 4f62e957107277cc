"""Calls of a compiled model without gradients: compiled as PyTorch compiles the same layers, beside what trains."""

import pytest
import torch
from support.compiled_layers import IDS, decoder, equal, step_of
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import lowtide

pytestmark = pytest.mark.usefixtures("one_thread")


def evaluated(model, ids=IDS, grad_mode=torch.no_grad):
    """The loss, and what the layers alone return: a loss seldom shows in what order they add up."""
    model.eval()
    with grad_mode():
        loss, x = model(ids), model.embed(ids)
        for block in model.blocks:
            x = block(x)
    return [loss, x]


def plain():
    """The same layers, compiled by PyTorch alone."""
    model = decoder(layers=2)
    for block in model.blocks:
        block.compile()
    return model


def num_compiled():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_has_the_bits_of_layers_compiled_by_pytorch_alone(grad_mode):
    model = decoder(layers=2)
    compiled = lowtide.compile(model, budget="60%")
    before = num_compiled()

    found = evaluated(compiled, grad_mode=grad_mode)

    assert num_compiled() == before + 1, "once for both layers"
    assert equal(found, evaluated(plain(), grad_mode=grad_mode))
    assert not equal(found, evaluated(decoder(layers=2), grad_mode=grad_mode)), "or this test shows nothing"
    assert equal(evaluated(model, grad_mode=grad_mode), found), "as a trainer calls it"
    assert compiled.reason == "" and compiled.status().calls == 0


@pytest.mark.thorough
def test_many_lengths_of_evaluation_are_compiled_twice_and_cost_training_nothing():
    model = decoder(layers=2)
    compiled = lowtide.compile(model)
    step_of(compiled, model)
    before = num_compiled()
    for length in (7, 9, 12, 20, 31):
        found = evaluated(compiled, IDS[:, :length])
        torch.testing.assert_close(found, evaluated(decoder(layers=2), IDS[:, :length]))
    assert num_compiled() == before + 2, "the first length, and then all others"


@pytest.mark.thorough
def test_past_the_limit_evaluations_run_as_they_are_and_training_is_still_compiled():
    model = decoder(layers=2)
    compiled = lowtide.compile(model)
    step_of(compiled, model)
    before = num_compiled()
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        for length in (7, 9, 12, 20):
            evaluated(compiled, IDS[:, :length])
    assert num_compiled() == before + 2

    model.train()
    step_of(compiled, model, IDS[:, :16])
    assert num_compiled() == before + 3 and compiled.reason == ""
    assert compiled.plan is not None and compiled.status().plans == 2


def test_an_evaluation_may_break_the_graph():
    class Metric(nn.Module):
        """It counts what it sees, where it is only evaluated."""

        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            if not torch.is_grad_enabled():
                torch._dynamo.graph_break()
            return F.gelu(self.inner(x))

    model = nn.ModuleList([Metric(), Metric()])
    lowtide.compile(model)
    before = num_compiled()
    with torch.no_grad():
        model[1](model[0](torch.randn(2, 8)))
    assert num_compiled() == before + 1


def test_an_evaluation_under_a_dispatch_mode_runs_as_it_is_and_the_next_one_is_compiled():
    model = decoder(layers=2)
    compiled = lowtide.compile(model)
    before = num_compiled()
    with FlopCounterMode(display=False) as flops:
        found = evaluated(compiled)
    assert equal(found, evaluated(decoder(layers=2))) and num_compiled() == before
    assert flops.get_total_flops() > 0
    assert equal(evaluated(compiled), evaluated(plain())) and num_compiled() > before


@pytest.mark.thorough
def test_an_evaluation_rounds_as_training_does():
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(0.5, 2, 64))

        def forward(self, x):
            return (x * self.scale).sin() * x + x

    class Chain(nn.ModuleList):
        def forward(self, x):
            return self[1](self[0](x))

    def found(compile_layers):
        model = Chain([nn.Sequential(Fused()), nn.Sequential(Fused())]).to(torch.bfloat16)
        compile_layers(model)
        with torch.no_grad():
            return [model(torch.linspace(-3, 3, 64, dtype=torch.bfloat16))]

    def plain_layers(model, **options):
        for layer in model:
            layer.compile(options=options)

    ours = found(lambda model: lowtide.compile(model, round_as_eager=True))
    assert equal(ours, found(lambda model: plain_layers(model, emulate_precision_casts=True)))
    assert not equal(ours, found(plain_layers)), "or this test shows nothing"
