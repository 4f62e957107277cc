"""Shapes of calls are remembered by what their signatures are made of: the same as when each is made anew."""

import torch
from torch import nn

from lowtide.runtime.call_shapes import CallShape, shape_of_call, shape_of_signature
from lowtide.tracing.module_calls import call_signature


def test_remembered_shapes_differ_where_signatures_do():
    model, x = nn.Linear(2, 2), torch.zeros(3, 2)
    double, leaf, words = x.double(), torch.zeros(3, 2, requires_grad=True), [x]
    arguments = [
        ((x,), {}), ((double,), {}), ((leaf,), {}), ((x.t(),), {}), ((x, x), {}), ((x,), {"a": x}), ((x,), {"b": x}),
        ((x, None), {}), ((x, True), {}), ((x, 1), {}), ((x, 2.5), {}), ((x, "a"), {}), ((x, "b"), {}), ((words,), {}),
        ((x,), {"a": x, "b": True}), ((x,), {"b": True, "a": x}), ((x, "a", x), {}),
    ]  # fmt: skip

    def shapes() -> list[tuple[CallShape, CallShape]]:
        calls = [(shape_of_call(model, a, k), shape_of_signature(call_signature(model, a, k))) for a, k in arguments]
        assert all(found == anew for found, anew in calls)
        return calls

    trained = shapes() + shapes()
    words.append(x)  # what a list holds may change
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = shapes()
    model.eval()
    assert not {found for found, _ in trained} & {found for found, _ in cast + shapes()}
