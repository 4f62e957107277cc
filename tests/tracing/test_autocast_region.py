"""Rehearsals within one autocast region: each makes the casts of its own step."""

import torch
from support.training_steps import mlp

import lowtide


def test_fit_and_verify_in_one_autocast_region_see_the_same_step():
    torch.manual_seed(0)
    model, batch = mlp(8, 64), torch.randn(512, 64)

    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        fit = lowtide.fit(model, batch, budget="60%")
        found = fit.verify(batch, rounds=0)
        model(batch).float().square().mean().backward()

    assert found.equal and found.mismatched_ops == found.unplanned_ops == 0
    assert found.measured_peak_bytes == found.predicted_peak_bytes
    assert fit.training_counts().mismatched_ops == 0 and fit.status().in_force
    fit.remove()


def test_a_trace_sees_the_casts_that_the_user_has_made_already_and_leaves_none_behind():
    model, batch = mlp(2, 8), torch.randn(4, 8)

    def casts():
        return [op.name for op in lowtide.trace(model, batch).ops if "_to_copy" in op.name]

    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        first = casts()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        model(batch)
        assert casts() == casts() == first
