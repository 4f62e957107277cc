"""Shapes of calls are remembered by what their signatures are made of: the same as when each is made anew."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide
from lowtide.shapes.call_shapes import CallShape, shape_of_call, shape_of_signature
from lowtide.step.module_calls import call_signature


def test_remembered_shapes_differ_where_signatures_do():
    model, x = nn.Linear(2, 2), torch.zeros(3, 2)
    double, leaf, words = x.double(), torch.zeros(3, 2, requires_grad=True), [x]
    full, masked = torch.ones(3, 2, dtype=torch.long), torch.zeros(3, 2, dtype=torch.long)
    arguments = [
        ((x,), {}), ((double,), {}), ((leaf,), {}), ((x.t(),), {}), ((x, x), {}), ((x,), {"a": x}), ((x,), {"b": x}),
        ((x, None), {}), ((x, True), {}), ((x, 1), {}), ((x, 2.5), {}), ((x, "a"), {}), ((x, "b"), {}), ((words,), {}),
        ((x,), {"attention_mask": full}), ((x,), {"attention_mask": masked}), ((x,), {"attention_mask": x}),
        ((x,), {"a": x, "b": True}), ((x,), {"b": True, "a": x}), ((x, "a", x), {}),
    ]  # fmt: skip

    def shapes() -> list[tuple[CallShape, CallShape]]:
        calls = [(shape_of_call(model, a, k), shape_of_signature(call_signature(model, a, k))) for a, k in arguments]
        assert all(found == anew for found, anew in calls)
        return calls

    trained = shapes() + shapes()
    assert len({found for found, _ in trained}) == len(arguments) - 2  # other numbers and another order: no other shape
    words.append(x)  # what a list holds may change
    named = [
        {"name": ["a.png", "b.png"], "sizes": [(1, 2), (3, 4)]},
        {"name": ["c.png", "d.png"], "sizes": [(5, 6)] * 2},
    ]
    assert (
        len({shape_of_call(model, (x, batch), {}) for batch in named}) == 1
    )  # files of samples, which differ each time
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        cast = shapes()
    model.eval()
    assert not {found for found, _ in trained} & {found for found, _ in cast + shapes()}


@pytest.mark.usefixtures("one_thread")
def test_a_mask_that_masks_nothing_has_a_plan_of_its_own():
    """transformers leaves such a mask away, and runs other ops."""
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    ).train()
    ids = torch.randint(3, 64, (4, 24))
    full, padded = torch.ones_like(ids), torch.ones_like(ids)
    padded[0, 16:] = 0
    with lowtide.fit(model, budget="70%") as fit:
        for mask in (full, padded):
            model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
            model.zero_grad()
            fit.wait(120)
        for mask in (full, padded):
            model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
            model.zero_grad()
            assert fit.status().in_force
        assert fit.status().plans == 2
