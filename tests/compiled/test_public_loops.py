"""Loops as nanoGPT and torchtitan have them: the bits of the same loop without lowtide, each step within the budget."""

import pytest
import torch
from support.compiled_loops import GPT, WITHIN, nanogpt, torchtitan_of_rank
from support.ranks import on_every_rank

import lowtide
from lowtide.compiled import op_rates
from lowtide.step.bits import same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["layers", "whole"])
def test_nanogpt_trains_the_same_within_a_budget_below_its_peak(whole):
    """By layer under autocast; a whole graph keeps more digits there in most sets than PyTorch's own."""
    torch.manual_seed(0)
    plain = GPT()
    model = GPT()
    model.load_state_dict(plain.state_dict())
    for part in [plain] if whole else plain.transformer.h:
        part.compile(fullgraph=True, dynamic=False)
    losses, weights, peaks = nanogpt(plain, autocast=not whole)
    budget = int(WITHIN * max(peaks))
    torch._dynamo.reset()
    op_rates._bytes_per_ms.cache_clear()  # it is measured with more memory than the model has, and in no step
    compiled = lowtide.compile(model, budget=budget, layers=["*"] if whole else None)

    found = nanogpt(model, compiled, autocast=not whole)

    assert losses == found[0] and all(map(same_bits, weights, found[1]))
    assert max(found[2]) <= budget < max(peaks)
    assert compiled.status().in_force and compiled.reason == ""
    assert any(set(plan.layers.values()) != {"plain"} for plan in compiled.plans)


@pytest.mark.slow
def test_torchtitan_compiles_by_layer_then_shards_and_trains_the_same_within_a_budget_below_its_peak():
    for told in on_every_rank(torchtitan_of_rank):
        assert told["equal"] and told["reason"] == "" and told["status"]["in_force"], told
        peaks = told["peaks"][2:]  # those of the first step are before there is a state of AdamW
        assert max(min(peaks[::2]), min(peaks[1::2])) <= told["budget"], told
        assert any(set(plan.values()) != {"plain"} for plan in told["plans"]), told
